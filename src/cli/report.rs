//! A serving run's report as tables.

use super::table::table;
use crate::capture::GraphCost;
use crate::config::ByteCount;
use crate::measure::serve::{Check, ServeReport, Spread};

/// Two columns: what, and how much.
pub(super) fn tables(report: &ServeReport) -> String {
    let mut rows = work(report);
    rows.extend(time(report));
    rows.extend(memory(report));
    let sizes = report.metrics.replays.iter().filter(|size| size.replays > 0);
    let sizes = sizes.map(|size| vec![size.rows.to_string(), size.replays.to_string()]);
    format!("{}\n\n{}", table(&["", ">value"], rows), table(&[">capture size", ">replays"], sizes))
}

fn row(name: &str, value: impl ToString) -> Vec<String> {
    vec![name.to_string(), value.to_string()]
}

fn work(report: &ServeReport) -> Vec<Vec<String>> {
    let finished: Vec<String> = report.finished.iter().map(|(why, count)| format!("{count} by {why}")).collect();
    let replays: u64 = report.metrics.replays.iter().map(|size| size.replays).sum();
    let mut rows = vec![
        row("requests", finished.join(", ")),
        row("tokens generated", report.tokens),
        row("prompt tokens prefilled", report.prefilled),
        row("engine steps", report.steps),
        row("decode steps by replay", replays),
        row("prefill steps (eager)", report.metrics.prefill_steps),
        row("padded rows", format!("{:.1} %", report.padding_waste * 100.0)),
    ];
    if report.preempted > 0 {
        rows.push(row("preemptions", report.preempted));
    }
    match report.fallbacks.is_empty() {
        true => rows.push(row("eager fallbacks", 0)),
        false => rows.extend(report.fallbacks.iter().map(|(why, count)| row(&format!("eager fallbacks: {why}"), count))),
    }
    if report.metrics.scored_alone > 0 {
        let reasons = report.parallel_refused.iter();
        rows.extend(
            reasons.map(|why| row(&format!("decode steps that no other rank shared: {why}"), report.metrics.scored_alone)),
        );
    }
    if report.metrics.shadowed > 0 {
        rows.push(row("replays repeated eagerly, equal bits", report.metrics.shadowed));
    }
    rows.push(match report.check {
        Check::Off => row("checked", "no"),
        Check::EachStep => row("steps equal to the eager unpadded run", report.compared),
        Check::Alone => row("requests equal to the eager unpadded run alone", report.compared),
    });
    rows
}

fn time(report: &ServeReport) -> Vec<Vec<String>> {
    let ms = |spread: Spread| format!("{:.2} / {:.2} ms", spread.median * 1e3, spread.p99 * 1e3);
    let mut rows = vec![
        row("capture", format!("{} sizes, {} nodes", report.capture.sizes.len(), report.capture.nodes)),
        row("lints of the largest graph", lints(report)),
        row("warm-up", format!("{:.1} ms", report.capture.warm_up_seconds * 1e3)),
        row("capture time", format!("{:.1} ms", report.capture.capture_seconds * 1e3)),
        row(
            "host time of a decode call, median / p99",
            format!("{:.1} / {:.1} us", report.submit_us.median, report.submit_us.p99),
        ),
    ];
    // With a shadow on the path these would measure the shadow.
    if report.check != Check::EachStep {
        rows.push(row("tokens a second", format!("{:.0}", report.tokens as f64 / report.seconds)));
        rows.push(row("time to first token, median / p99", ms(report.first_token_seconds)));
        rows.push(row("inter-token latency, median / p99", ms(report.inter_token_seconds)));
    }
    rows
}

/// How many launches could go; `--json` and `RUST_LOG=info` name the nodes.
fn lints(report: &ServeReport) -> String {
    let lints = &report.capture.lints;
    let [fast, slow] = lints.iter().filter_map(|lint| lint.saves_us).fold([0.0, 0.0], |[a, b], [c, d]| [a + c, b + d]);
    match lints.iter().map(|lint| lint.times).sum::<u32>() {
        0 => "none".into(),
        times => format!("{times}, worth {fast:.1} to {slow:.1} us a replay on a GPU"),
    }
}

fn memory(report: &ServeReport) -> Vec<Vec<String>> {
    let memory = &report.memory;
    let mut rows = vec![
        row("memory planned", ByteCount(memory.planned)),
        row(
            "memory of the graphs, by the device / estimated before",
            format!("{} / {}", ByteCount(memory.graphs), ByteCount(memory.graphs_estimated)),
        ),
    ];
    if let Some(GraphCost { fixed_bytes, node_bytes }) = memory.graph_cost {
        rows.push(row("memory of a graph, fixed + a node", format!("{} + {node_bytes} B", ByteCount(fixed_bytes))));
    }
    if let (Some(base), Some(captured), Some(served)) = (memory.resident_base, memory.resident_captured, memory.resident_served) {
        rows.push(row("resident before", ByteCount(base)));
        rows.push(row(
            "resident after capture",
            format!(
                "{} ({:.1} % of plan and base)",
                ByteCount(captured),
                captured as f64 / (memory.planned + base) as f64 * 100.0
            ),
        ));
        rows.push(row("resident after serving", ByteCount(served)));
    }
    rows
}
