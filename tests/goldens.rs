//! `graphs/` holds dumps of small graphs; they change only by `CAPSTAN_BLESS=1 cargo test --test goldens`, as reviewed diffs.

use std::path::Path;
use std::sync::Arc;

use capstan::chain::{MsaChains, StepChains};
use capstan::config::{CacheBudget, CaptureSizes, Limits, ModelShape};
use capstan::dump::Dump;
use capstan::hal;
use capstan::model::M3Chains;
use capstan::runtime::Executor;

fn dump(device: &str, chain: &str, rows: u32) -> Dump {
    let limits = Limits {
        max_model_len: 1024,
        max_num_seqs: rows,
        max_num_batched_tokens: 64,
        capture: CaptureSizes::List(vec![rows]),
        cache: CacheBudget::Blocks(128),
        ..Limits::default()
    };
    let shape = ModelShape::nano();
    let chains: Arc<dyn StepChains> = match chain {
        "msa" => Arc::new(MsaChains::new(&shape, &limits, 0).unwrap()),
        _ => Arc::new(M3Chains::without_weights(&shape, &limits).unwrap()),
    };
    let mut executor = Executor::new(&hal::open(device).unwrap(), chains).unwrap();
    executor.capture(|_| ()).unwrap();
    Dump::of(executor.graphs().iter().next().unwrap()).unwrap()
}

#[test]
fn graphs_are_what_was_reviewed() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("graphs");
    let bless = std::env::var_os("CAPSTAN_BLESS").is_some();
    for (chain, rows) in [("msa", 1), ("msa", 8), ("m3", 8)] {
        let dump = dump("null", chain, rows);
        for (extension, text) in [("json", dump.json() + "\n"), ("dot", dump.dot())] {
            let file = folder.join(format!("{chain}.nano.b{rows:04}.{extension}"));
            if bless {
                std::fs::write(&file, &text).unwrap();
            }
            let golden = std::fs::read_to_string(&file).unwrap_or_default();
            let differs = golden.lines().zip(text.lines()).position(|(golden, now)| golden != now);
            assert!(
                golden == text,
                "{} differs from line {:?} on; review `capstan dump`, then bless with CAPSTAN_BLESS=1",
                file.display(),
                differs.map(|line| line + 1)
            );
            assert!(!text.contains("0x"), "no addresses");
        }
    }
}

/// What a device records is what any other does.
#[test]
fn every_device_dumps_the_same() {
    for chain in ["msa", "m3"] {
        let (null, cpu) = (dump("null", chain, 8), dump("cpu", chain, 8));
        assert!(null == cpu, "{chain}");
        assert_eq!(null.text().lines().count(), null.nodes.len() + 1);
        assert_eq!(null.edges.len() + 1, null.nodes.len(), "a straight line");
    }
}
