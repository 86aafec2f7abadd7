//! `capstan devices`: what is there, why the others are not, and whether they replay graphs right.

use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use serde_json::{Value, json};

use super::table::table;
use super::{DeviceChoice, Shared, print};
use crate::capture::GraphCost;
use crate::config::ByteCount;
use crate::error::Result;
use crate::hal::{self, Device};
use crate::invariant::{SelfTestReport, graph_cost, self_test};

/// Flags of `capstan devices`.
#[derive(Debug, Args)]
pub(super) struct DevicesArgs {
    #[command(flatten)]
    shared: Shared,
    /// Replay small graphs with known results on every device that is there, or on --device alone
    #[arg(long)]
    self_test: bool,
}

/// A device, or why it is not there, and where it was tested what came of it.
struct Found {
    name: &'static str,
    device: Result<Arc<dyn Device>>,
    tested: Option<Result<Tested>>,
}

struct Tested {
    report: SelfTestReport,
    /// Of a device that passed.
    graph_cost: Option<GraphCost>,
}

impl Tested {
    fn new(device: &Arc<dyn Device>) -> Result<Tested> {
        // Measured first: memory that a driver keeps from earlier graphs hides what new ones take. A device that records
        // graphs wrong has no figure, and its report says why.
        let graph_cost = graph_cost(device);
        let report = self_test(device)?;
        let graph_cost = if report.passed() { Some(graph_cost?) } else { None };
        Ok(Tested { report, graph_cost })
    }
}

pub(super) fn run(args: &DevicesArgs) -> Result<ExitCode> {
    let chosen = args.shared.device;
    let named = |name: &&str| chosen == DeviceChoice::Auto || chosen.name() == *name;
    let found: Vec<Found> = ["hip", "cuda", "cpu", "null"]
        .into_iter()
        .filter(named)
        .map(|name| {
            let device = hal::open(name);
            let tested = device.as_ref().ok().filter(|device| args.self_test && device.info().executes).map(Tested::new);
            Found { name, device, tested }
        })
        .collect();
    let failed =
        |found: &Found| found.tested.as_ref().is_some_and(|tested| !tested.as_ref().is_ok_and(|tested| tested.report.passed()));
    if args.shared.json {
        let devices: Vec<Value> = found.iter().map(to_json).collect();
        print(&format!("{:#}", json!({ "devices": devices })))?;
    } else {
        let columns = ["device", "name", "architecture", ">units x lanes", ">free memory", "driver"];
        print(&table(&columns, found.iter().map(to_row)))?;
        for Found { name, tested, .. } in &found {
            if let Some(tested) = tested {
                print(&format!("\nSelf-test of {name}\n{}", describe(tested)))?;
            }
        }
    }
    Ok(if found.iter().any(failed) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn to_json(Found { name, device, tested }: &Found) -> Value {
    let device = match device {
        Ok(device) => device,
        Err(error) => return json!({ "device": name, "unavailable": error.message(), "help": error.help_line() }),
    };
    let mut value = json!({ "device": name, "info": device.info(), "memory": device.memory().ok() });
    match tested {
        Some(Ok(Tested { report, graph_cost })) => {
            value["self_test"] = json!({ "passed": report.passed(), "report": report, "graph_cost": graph_cost });
        }
        Some(Err(error)) => value["self_test"] = json!({ "passed": false, "error": error.to_string() }),
        None => {}
    }
    value
}

fn to_row(Found { name, device, .. }: &Found) -> Vec<String> {
    let device = match device {
        Ok(device) => device,
        Err(error) => return vec![(*name).into(), format!("not available: {}", error.message())],
    };
    let info = device.info();
    let memory = device.memory().map_or_else(
        |error| error.message().to_string(),
        |memory| format!("{} of {}", ByteCount(memory.free_bytes), ByteCount(memory.total_bytes)),
    );
    let units = format!("{} x {}", info.compute_units, info.wave_lanes);
    vec![(*name).into(), info.name.clone(), info.arch.clone(), units, memory, info.driver.clone()]
}

fn describe(tested: &Result<Tested>) -> String {
    let Tested { report, graph_cost } = match tested {
        Ok(tested) => tested,
        Err(error) => return format!("did not run: {error}"),
    };
    let rows = report.checks.iter().map(|check| {
        let outcome = check.fault.as_ref().map_or_else(
            || "right".to_owned(),
            |fault| format!("WRONG: {}; looks like {}: {}", fault.message, fault.issue.id, fault.issue.symptom),
        );
        vec![check.name.into(), check.replays.to_string(), format!("{:.1}", check.seconds * 1e3), outcome]
    });
    let kept = match report.kept_bytes {
        0 => "Instances and recordings gave all device memory back.".into(),
        bytes => format!("Instances and recordings kept {} of device memory.", ByteCount(bytes)),
    };
    let cost = graph_cost.map_or_else(String::new, |GraphCost { fixed_bytes, node_bytes }| {
        format!("A graph takes {} of device memory and {node_bytes} bytes a node. ", ByteCount(fixed_bytes))
    });
    format!("{}\n{cost}{kept}", table(&["check", ">replays", ">ms", "results"], rows))
}
