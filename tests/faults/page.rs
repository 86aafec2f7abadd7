//! The page that tells the suite: `docs/faults.md`, written by the suite itself.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use capstan::Error;

use super::rig::Fault;

const HEAD: &str = "\
# Faults and what catches them

A correct setup (the sparse-attention chain of the nano shape on the CPU device) is damaged in one way at a time. Each row says
what was done, which invariant of [ARCHITECTURE.md](../ARCHITECTURE.md) (or kind of error) caught it, and the line of the report
that names the culprit. The same suite runs every chain undamaged under the full audit of each step, and nothing may be found.

This page is written by `CAPSTAN_BLESS=1 cargo test --test faults`; without that variable the test fails if it is out of date.
";

/// The page so far.
pub struct Page {
    text: String,
    rows: usize,
}

impl Page {
    pub fn new() -> Page {
        Page { text: HEAD.into(), rows: 0 }
    }

    pub fn section(&mut self, title: &str) {
        let _ = write!(self.text, "\n## {title}\n\n| fault | caught by | report |\n|---|---|---|\n");
    }

    pub fn row(&mut self, fault: &Fault, error: &Error) {
        self.rows += 1;
        let line = telling_line(fault, error).replace('|', "\\|");
        let _ = writeln!(self.text, "| {} | {} | {line} |", fault.name, fault.caught_by);
    }

    /// Compares the page with the one in the repository, or writes it.
    pub fn hold(&self, path: PathBuf) {
        let text = format!("{}\n{} faults, {} caught.\n", self.text, self.rows, self.rows);
        if std::env::var_os("CAPSTAN_BLESS").is_some() {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, &text).unwrap();
        }
        let held = fs::read_to_string(&path).unwrap_or_default();
        assert!(held == text, "{} is out of date: CAPSTAN_BLESS=1 cargo test --test faults", path.display());
    }
}

/// The line of the message that names most of what it must name, without numbers of this run and machine.
fn telling_line(fault: &Fault, error: &Error) -> String {
    let text = error.to_string();
    let lines = text.lines().filter(|line| !line.starts_with("  help:"));
    let named = |line: &&str| fault.names.iter().filter(|name| line.contains(**name)).count();
    // The first of those that name equally much.
    let line = lines.rev().max_by_key(named).unwrap_or_default().trim();
    let line = line.strip_prefix(fault.caught_by).map_or(line, |rest| rest.trim_start_matches(':').trim());
    let mut plain = String::new();
    for word in line.split_inclusive(|c: char| !c.is_alphanumeric()) {
        let bare = word.trim_end_matches(|c: char| !c.is_alphanumeric());
        let fingerprint = bare.len() == 16 && bare.chars().all(|c| c.is_ascii_hexdigit());
        let token = plain.ends_with("Some(");
        plain.push_str(if fingerprint || token { "…" } else { bare });
        plain.push_str(&word[bare.len()..]);
    }
    plain
}
