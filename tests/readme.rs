//! README.md says nothing that is not so: its commands run, its tables name what there is, its links lead somewhere.
#![cfg(feature = "cli")]

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};

const README: &str = include_str!("../README.md");

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn capstan(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_capstan")).args(args).env("RUST_LOG", "warn").output().expect("the program runs")
}

/// Lines of the code blocks of one language, without their comments.
fn code(language: &str) -> Vec<&'static str> {
    let mut lines = Vec::new();
    let mut within = false;
    for line in README.lines() {
        match line.strip_prefix("```") {
            Some(fence) => within = fence == language,
            None if within => lines.push(line.split(" #").next().unwrap_or(line).trim()),
            None => {}
        }
    }
    lines
}

/// What stands in backticks at the start of every table row under a heading.
fn first_cells(heading: &str) -> Vec<&'static str> {
    let section = README.split("\n## ").find(|section| section.starts_with(heading)).expect("the heading is there");
    section.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect()
}

#[test]
fn the_two_commands_are_a_demo_that_runs_and_the_tests_that_ci_calls() {
    let lines = code("sh");
    let [demo, test] = lines[..] else { panic!("two commands, but {lines:?}") };
    let args: Vec<&str> = demo.strip_prefix("cargo run --release -- ").expect("the first runs the program").split(' ').collect();
    let output = capstan(&args);
    assert!(output.status.success(), "{demo}: {}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).contains("tokens a second"), "{output:?}");
    let ci = std::fs::read_to_string(root().join(".ci/run")).expect("CI's script is there");
    assert!(ci.lines().any(|line| line == test), "CI does not call {test:?}");
}

#[test]
fn the_table_of_commands_is_the_programs_own() {
    let help = String::from_utf8(capstan(&["--help"]).stdout).unwrap();
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.trim().is_empty());
    // A line that wraps is indented further than a name.
    let names = listed.filter(|line| !line.starts_with("   ")).filter_map(|line| line.split_whitespace().next());
    let program: BTreeSet<&str> = names.filter(|name| *name != "help").collect();
    let told: BTreeSet<&str> = first_cells("The command line").iter().filter_map(|cell| cell.split(' ').next()).collect();
    assert_eq!(told, program);
    for command in told {
        assert!(capstan(&[command, "--help"]).status.success(), "{command} --help");
    }
}

#[test]
fn every_bench_that_is_told_of_is_declared() {
    let manifest: toml::Table = std::fs::read_to_string(root().join("Cargo.toml")).unwrap().parse().unwrap();
    let declared: BTreeSet<&str> = manifest["bench"].as_array().unwrap().iter().filter_map(|b| b["name"].as_str()).collect();
    let cells = first_cells("Measuring");
    let told: BTreeSet<&str> = cells.iter().filter_map(|cell| cell.strip_prefix("cargo bench --bench ")).collect();
    assert_eq!(told, declared);
}

#[test]
fn every_link_leads_to_a_file() {
    for page in ["README.md", "ARCHITECTURE.md"] {
        let text = std::fs::read_to_string(root().join(page)).unwrap();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            assert!(link.contains("://") || root().join(link).exists(), "{page}: {link}");
        }
    }
}
