//! ARCHITECTURE.md's module order holds: a module uses only modules above it in the table.

use std::fs;
use std::path::{Path, PathBuf};

fn sources(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("src is readable") {
        let path = entry.expect("src is readable").path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|ext| ext == "rs") {
            into.push(path);
        }
    }
}

/// The module names of the table, in order; several may share a row.
fn order(text: &str) -> Vec<Vec<String>> {
    let table = text.split("## Structure").nth(1).expect("ARCHITECTURE.md has a Structure section");
    let rows = table.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|')).skip(2);
    rows.map(|row| {
        let names = row.split('|').nth(1).expect("a first column");
        names.split(',').map(|name| name.trim().trim_matches('`').to_string()).collect()
    })
    .collect()
}

#[test]
fn modules_use_only_modules_above_them() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let order = order(&fs::read_to_string(root.join("ARCHITECTURE.md")).expect("ARCHITECTURE.md"));
    let rank = |module: &str| order.iter().position(|row| row.iter().any(|name| name == module));
    let mut files = Vec::new();
    sources(&root.join("src"), &mut files);
    let mut wrong = Vec::new();
    for path in &files {
        let relative = path.strip_prefix(root.join("src")).expect("under src");
        let first = relative.components().next().expect("a component").as_os_str().to_string_lossy().to_string();
        let module = first.trim_end_matches(".rs").to_string();
        if module == "lib" || module == "main" {
            continue;
        }
        let Some(own) = rank(&module) else {
            wrong.push(format!("{module} is not in ARCHITECTURE.md's table"));
            continue;
        };
        let text = fs::read_to_string(path).expect("a source file");
        // Tests at the end of a file may use anything.
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        for (at, line) in code.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//")) {
            for used in line.split("crate::").skip(1) {
                let used: String = used.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                if let Some(other) = rank(&used)
                    && other > own
                {
                    wrong.push(format!("{}:{}: {module} uses {used}, which stands below it", relative.display(), at + 1));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn unsafe_code_stands_in_files_that_say_why() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    let mut wrong = Vec::new();
    for path in files {
        let text = fs::read_to_string(&path).expect("a source file");
        let code: String = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
        let blocks = code.matches("unsafe {").count() + code.matches("unsafe impl").count();
        let reasons = text.matches("SAFETY").count();
        if blocks > reasons {
            wrong.push(format!("{}: {blocks} unsafe blocks, {reasons} SAFETY lines", path.display()));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// The ids of the invariants' table.
fn invariants(text: &str) -> Vec<String> {
    let table = text.split("## Invariants").nth(1).expect("ARCHITECTURE.md has an Invariants section");
    let rows = table.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|')).skip(2);
    rows.map(|row| row.split('|').nth(1).expect("a first column").trim().to_string()).collect()
}

#[test]
fn the_invariants_of_the_code_are_those_of_the_table() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let table = invariants(&fs::read_to_string(root.join("ARCHITECTURE.md")).expect("ARCHITECTURE.md"));
    let listed: Vec<&str> = capstan::invariant::id::ALL.iter().map(|invariant| invariant.id).collect();
    assert_eq!(table, listed);
    let mut files = Vec::new();
    sources(&root.join("src"), &mut files);
    for path in files {
        let text = fs::read_to_string(&path).expect("a source file");
        for quoted in text.split("Error::invariant(").chain(text.split("Finding::new(")).skip(1) {
            let id: String = quoted.trim_start().trim_start_matches('"').chars().take_while(|&c| c != '"' && c != ',').collect();
            let is_id = id.split_once('-').is_some_and(|(name, number)| {
                name.chars().all(|c| c.is_ascii_uppercase()) && number.chars().all(|c| c.is_ascii_digit())
            });
            assert!(!is_id || listed.contains(&&*id), "{}: {id} is in no list", path.display());
        }
    }
}
