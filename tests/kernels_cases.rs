//! Writes random launches with the results of the CPU ops to a directory, for executors outside this process (tests/emulator).
//!
//! `CAPSTAN_CASES=DIR` says where to; without it there is nothing to do. `CAPSTAN_SEED`, `CAPSTAN_KERNEL`, `CAPSTAN_ROUNDS` as elsewhere.

mod kernels;

use std::fs;
use std::path::PathBuf;

use kernels::ops::run_op;
use kernels::{Case, Compare, Draw, cases, rounds};
use serde_json::json;

/// One case as JSON: the argument struct without addresses, and what lies behind each pointer before and after.
fn describe(case: &Case) -> serde_json::Value {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let expected = run_op(case);
    let buffers = case.buffers.iter().zip(&expected).map(|(buffer, expected)| {
        let tolerance = match buffer.compare {
            Compare::Exact => json!(null),
            Compare::Close { abs, rel } => json!([abs, rel]),
        };
        json!({
            "field": buffer.field,
            "offset": case.kernel.args.field(buffer.field).map(|field| field.offset),
            "dtype": buffer.dtype.name(),
            "tolerance": tolerance,
            "before": hex(&buffer.bytes),
            "after": hex(expected),
        })
    });
    json!({
        "name": case.name,
        "kernel": case.kernel.symbol,
        "source": case.kernel.source,
        "grid": case.shape.grid,
        "workgroup": case.shape.workgroup,
        "lds_bytes": case.shape.lds_bytes,
        "args": hex(&case.args),
        "buffers": buffers.collect::<Vec<_>>(),
    })
}

#[test]
fn cases_are_written_where_asked() {
    let Some(directory) = std::env::var_os("CAPSTAN_CASES").map(PathBuf::from) else {
        eprintln!("skipped: CAPSTAN_CASES names no directory");
        return;
    };
    fs::create_dir_all(&directory).expect("the directory");
    let mut draw = Draw::seeded("cases");
    let mut number = 0;
    for _ in 0..rounds() {
        for case in cases(&mut draw) {
            let path = directory.join(format!("{number:04}-{}.json", case.kernel.symbol));
            fs::write(&path, describe(&case).to_string()).expect("writes");
            number += 1;
        }
    }
}
