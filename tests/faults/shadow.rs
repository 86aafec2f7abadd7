//! Faults that only a shadow step finds: the replay does something else than the driver, asked at capture, said.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use capstan::Result;
use capstan::runtime::Checks;

use super::chain::with_double;
use super::liar::Lies;
use super::recorded::recorded_otherwise;
use super::rig::{Fault, Rig};
use super::user::{self, ARMED};

/// Every replayed step repeated eagerly, nothing else.
pub const SHADOW: Checks =
    Checks { self_test: None, audit_every: None, poison_free_blocks: false, each_node: false, shadow_every: Some(1) };

/// A kernel that goes wrong in replays alone.
fn wrong_in_replays_alone() -> Result<()> {
    let mut rig = Rig::of(with_double(&[&user::SHORT], &user::SHORT))?;
    rig.executor.set_checks(SHADOW);
    rig.decode()?;
    // The buffer is not what the step leaves behind.
    let y = rig.buffer("user.y");
    rig.executor.arena().fill(y, 0, rig.bytes("user.y"), 0x11)?;
    let device = rig.executor.arena().device().clone();
    rig.liar.lie(Lies {
        replay: Some(Arc::new(|| ARMED.store(true, Ordering::Relaxed))),
        replayed: Some(Arc::new(move || {
            drop(device.synchronize());
            ARMED.store(false, Ordering::Relaxed);
        })),
        ..Lies::default()
    });
    let caught = rig.decode().map(drop);
    // The lie holds the device, which holds the lie.
    rig.liar.lie(Lies::default());
    caught
}

pub static FAULTS: &[Fault] = &[
    Fault {
        name: "a node recorded otherwise than the driver said at capture",
        caught_by: "PAD-3",
        names: &["node 9 layer1.attend.out", "buffer attention.out", "in the replay", "as in the eager run"],
        run: || {
            let mut rig = recorded_otherwise(9, "scale")?;
            rig.open(20)?;
            rig.executor.set_checks(SHADOW);
            rig.decode().map(drop)
        },
    },
    Fault {
        name: "the same, by the audit of the step",
        caught_by: "ADDR-4",
        names: &["node 9 layer1.attend.scale"],
        run: || {
            let mut rig = recorded_otherwise(9, "scale")?;
            rig.open(20)?;
            rig.executor.set_checks(Checks { audit_every: Some(1), ..SHADOW });
            rig.decode().map(drop)
        },
    },
    Fault {
        name: "a kernel that goes wrong in replays alone",
        caught_by: "PAD-3",
        names: &["buffer user.y", "other bits after the replay of the whole graph"],
        run: wrong_in_replays_alone,
    },
];
