//! `capstan devices`: what is there, and why the others are not.

use clap::Args;
use serde_json::{Value, json};

use super::table::table;
use super::{Shared, print};
use crate::config::ByteCount;
use crate::error::Result;
use crate::hal;

/// Flags of `capstan devices`.
#[derive(Debug, Args)]
pub(super) struct DevicesArgs {
    #[command(flatten)]
    shared: Shared,
}

pub(super) fn run(args: &DevicesArgs) -> Result<()> {
    let found = ["hip", "cuda", "cpu", "null"].map(|name| (name, hal::open(name)));
    if args.shared.json {
        let devices: Vec<Value> = found
            .iter()
            .map(|(name, device)| match device {
                Ok(device) => json!({ "device": name, "info": device.info(), "memory": device.memory().ok() }),
                Err(error) => json!({ "device": name, "unavailable": error.message(), "help": error.help_line() }),
            })
            .collect();
        return print(&format!("{:#}", json!({ "devices": devices })));
    }
    let rows = found.iter().map(|(name, device)| match device {
        Ok(device) => {
            let info = device.info();
            let memory = device.memory().map_or_else(
                |error| error.message().to_string(),
                |memory| format!("{} of {}", ByteCount(memory.free_bytes), ByteCount(memory.total_bytes)),
            );
            let units = format!("{} x {}", info.compute_units, info.wave_lanes);
            vec![(*name).into(), info.name.clone(), info.arch.clone(), units, memory, info.driver.clone()]
        }
        Err(error) => vec![(*name).into(), format!("not available: {}", error.message())],
    });
    print(&table(&["device", "name", "architecture", ">units x lanes", ">free memory", "driver"], rows))
}
