//! The HTML dump in a headless Chromium: folding, buffers and their readers and writers, the memory map, search.
//!
//! `tests/page/drive.js` clicks through the page; what it saw comes back in the page's text. Skips by name without Chromium
//! (`CAPSTAN_CHROMIUM` names another program).

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use capstan::chain::{MsaChains, StepChains};
use capstan::config::{CaptureSizes, Limits, ModelShape};
use capstan::dump::{Dump, DumpValue};
use capstan::hal;
use capstan::kernels::Access;
use capstan::model::M3Chains;
use capstan::runtime::Executor;

fn dump(chain: &str, shape: &ModelShape) -> Dump {
    let limits = Limits {
        max_model_len: 512,
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        capture: CaptureSizes::List(vec![8]),
        ..Limits::default()
    };
    let chains: Arc<dyn StepChains> = match chain {
        "msa" => Arc::new(MsaChains::new(shape, &limits, 0).unwrap()),
        _ => Arc::new(M3Chains::without_weights(shape, &limits).unwrap()),
    };
    let mut executor = Executor::new(&hal::open("null").unwrap(), chains).unwrap();
    executor.capture(|_| ()).unwrap();
    Dump::of(executor.graphs().iter().next().unwrap()).unwrap()
}

fn chromium() -> Option<String> {
    let names =
        std::env::var("CAPSTAN_CHROMIUM").map_or_else(|_| vec!["chromium".into(), "google-chrome".into()], |name| vec![name]);
    let found = names.into_iter().find(|name| Command::new(name).arg("--version").output().is_ok_and(|out| out.status.success()));
    if found.is_none() {
        println!("skipped: no chromium");
    }
    found
}

/// Opens `page` with the driver at its end and gives what the driver reported.
fn drive(chromium: &str, page: &str, folder: &Path) -> HashMap<String, String> {
    let listener = "<head><script>const errors = []; addEventListener('error', event => errors.push(event.message)); \
                    addEventListener('securitypolicyviolation', event => errors.push(event.violatedDirective));</script>";
    let driver = format!("<script>{}</script></body>", include_str!("page/drive.js"));
    assert!(page.contains("<head>") && page.contains("</body>"));
    let file = folder.join("page.html");
    std::fs::write(&file, page.replacen("<head>", listener, 1).replace("</body>", &driver)).unwrap();
    let output = Command::new(chromium)
        .args(["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1600,1000", "--dump-dom"])
        .arg(format!("--user-data-dir={}", folder.join("profile").display()))
        .arg(format!("file://{}", file.display()))
        .output()
        .unwrap();
    let dom = String::from_utf8_lossy(&output.stdout);
    let report = dom.split("<pre id=\"report\">").nth(1).and_then(|rest| rest.split("</pre>").next());
    let report = report.unwrap_or_else(|| panic!("the driver did not finish: {}", String::from_utf8_lossy(&output.stderr)));
    let lines = report.lines().filter_map(|line| line.split_once(": "));
    lines.map(|(what, value)| (what.to_string(), value.to_string())).collect()
}

/// Labels of the nodes that touch a buffer in one of two ways.
fn who(dump: &Dump, name: &str, ways: [Access; 2]) -> Vec<String> {
    let touches =
        |value: &DumpValue| matches!(value, DumpValue::Pointer { buffer, access, .. } if buffer == name && ways.contains(access));
    dump.nodes.iter().filter(|node| node.args.iter().any(|arg| touches(&arg.value))).map(|node| node.label.clone()).collect()
}

#[test]
fn a_person_finds_readers_and_writers() {
    let Some(chromium) = chromium() else { return };
    for (chain, shape) in [("msa", ModelShape::nano()), ("m3", ModelShape::nano()), ("m3", ModelShape::minimax_m3())] {
        let dump = dump(chain, &shape);
        let page = dump.html().unwrap();
        assert!(page.len() < 5_000_000, "{} nodes in {} bytes", dump.nodes.len(), page.len());
        let folder = tempfile::tempdir().unwrap();
        let saw = drive(&chromium, &page, folder.path());
        println!("{chain}: {} nodes, {} bytes, unfolded in {} ms", dump.nodes.len(), page.len(), saw["unfold ms"]);
        let expect = |what: &str, value: &str| {
            assert_eq!(saw.get(what).map(String::as_str), Some(value), "{chain}: {what}: {saw:#?}");
        };
        let layers = dump.nodes.iter().filter_map(|node| node.layer).max().unwrap() as usize + 1;
        let alone = dump.nodes.iter().filter(|node| node.layer.is_none()).count();
        let of_layer_1 = dump.nodes.iter().filter(|node| node.layer == Some(1)).count();
        let writers = who(&dump, "attention.page_table", [Access::Write, Access::ReadWrite]);
        let readers = who(&dump, "attention.page_table", [Access::Read, Access::ReadWrite]);
        assert!(!writers.is_empty() && !readers.is_empty());
        let attend = dump.nodes.iter().find(|node| node.label == "layer1.attend").unwrap();
        expect("errors", "none");
        expect("nodes", &dump.nodes.len().to_string());
        expect("layers", &layers.to_string());
        expect("rows folded", &(layers + alone).to_string());
        expect("nodes of layer 1", &of_layer_1.to_string());
        expect("rows unfolded", &(layers + dump.nodes.len()).to_string());
        expect("edges drawn", "true");
        expect("selected", "attention.page_table");
        expect("address", "#buffer=attention.page_table");
        expect("lit writers", &writers.join(" "));
        expect("lit readers", &readers.join(" "));
        expect("listed writers", &writers.len().to_string());
        expect("listed readers", &readers.len().to_string());
        expect("others dim", "true");
        expect("nothing lit", "0");
        expect("selected in the map", "attention.page_table");
        expect("its bar is drawn", "true");
        expect("bars inside the map", "true");
        expect("lifetime", &format!("{} {}", writers[0], readers.last().unwrap()));
        expect("zoomed", "true");
        expect("hits", &dump.nodes.iter().filter(|node| node.label.contains("layer1.attend")).count().to_string());
        expect("no hit", "nothing found");
        expect("found", "layer1.attend");
        expect("its arguments", &attend.args.len().to_string());
        expect("after Escape", "Buffers");
    }
}

#[test]
fn the_page_loads_nothing_and_names_cannot_break_out() {
    let mut dump = dump("msa", &ModelShape::nano());
    dump.chain = "</script><script>alert(1)</script>".into();
    dump.nodes[0].label = "<!--<script>".into();
    let page = dump.html().unwrap();
    assert!(!page.contains("alert(1)</script>") && !page.contains("<!--"));
    assert!(page.contains("default-src 'none'"));
    for loads in ["src=", "@import", "url(", "fetch(", "XMLHttpRequest", "http://", "https://"] {
        assert!(!page.contains(loads), "the page has {loads}");
    }
    dump.buffers.retain(|buffer| buffer.planned.spec.name != "attention.q");
    let error = dump.html().unwrap_err().to_string();
    assert!(error.contains("attention.q"), "{error}");
}
