//! `capstan diff`: what differs between two dumps.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde_json::json;

use super::print;
use super::table::table;
use crate::dump::{Change, Diff, Dump, Verdict};
use crate::error::{Error, Result};

/// Flags of `capstan diff`.
#[derive(Debug, Args)]
pub(super) struct DiffArgs {
    /// First dump, .json
    #[arg(value_name = "A")]
    a: PathBuf,
    /// Second dump, .json
    #[arg(value_name = "B")]
    b: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Exit code 1 if they differ in earnest.
pub(super) fn run(args: &DiffArgs) -> Result<ExitCode> {
    let diff = Diff::of(&read(&args.a)?, &read(&args.b)?);
    let verdict = diff.verdict();
    if args.json {
        let same = verdict != Verdict::Different;
        print(&format!("{:#}", json!({ "same": same, "verdict": verdict.to_string(), "changes": diff.changes })))?;
    } else {
        if !diff.changes.is_empty() {
            print(&table(&["change", ">places", "first", "field", "a", "b", "follows"], folded(&diff.changes)))?;
        }
        print(&verdict.to_string())?;
    }
    Ok(if verdict == Verdict::Different { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn read(file: &Path) -> Result<Dump> {
    let name = file.display().to_string();
    let help = "pass two files written by capstan dump --format json";
    // Wrong usage, exit code 2: 1 is for a difference.
    let usage = |message: &str| Error::config(message.to_string()).help(help);
    let json = std::fs::read_to_string(file).map_err(|error| usage(&format!("{name}: {error}")))?;
    Dump::read(&json, &name).map_err(|error| usage(error.message()))
}

/// One row for equal changes at several places, so that the layers of a model are one line; real differences first.
fn folded(changes: &[Change]) -> Vec<Vec<String>> {
    let mut groups: Vec<(&Change, usize)> = Vec::new();
    let mut known = BTreeMap::new();
    for change in changes {
        let at = *known.entry((change.kind, &change.field, &change.a, &change.b, change.cause)).or_insert(groups.len());
        match groups.get_mut(at) {
            Some((_, count)) => *count += 1,
            None => groups.push((change, 1)),
        }
    }
    groups.sort_by_key(|(change, _)| change.cause.is_some());
    let row = |(change, count): (&Change, usize)| {
        let follows = change.cause.map_or_else(|| "NO".into(), |cause| cause.to_string());
        let [a, b] = [&change.a, &change.b].map(String::clone);
        vec![change.kind.to_string(), count.to_string(), change.at.clone(), change.field.clone(), a, b, follows]
    };
    groups.into_iter().map(row).collect()
}
