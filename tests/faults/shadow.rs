//! Faults that only a shadow step finds: the replay does something else than the driver, asked at capture, said.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use capstan::hal::{Node, NodeId};
use capstan::runtime::Checks;
use capstan::{Error, Result};

use super::chain::with_double;
use super::liar::Lies;
use super::rig::{Fault, Rig, msa, scalar};
use super::user::{self, ARMED};

/// Every replayed step repeated eagerly, nothing else.
pub const SHADOW: Checks =
    Checks { self_test: None, audit_every: None, poison_free_blocks: false, each_node: false, shadow_every: Some(1) };

/// Exponent bit of a float: set and cleared by the same change.
const BIT: u32 = 1 << 23;

/// Captures a graph whose node `at` holds another `field`, which the driver denies at capture.
pub fn recorded_otherwise(at: u32, field: &'static str) -> Result<Rig> {
    let mut rig = Rig::new(msa())?;
    let node = |rig: &Rig| match rig.executor.graphs().iter().next().map(|graph| graph.graph().node(NodeId(at))) {
        Some(Ok(Node::Kernel(node))) => Ok(node),
        _ => Err(Error::state("not a kernel")),
    };
    rig.executor.capture(|_| ())?;
    // What the node will hold, and what the driver will say it does.
    let truth = node(&rig)?;
    let mut damaged = truth.clone();
    scalar(&mut damaged, field, |bits| bits ^ BIT);
    rig.liar.lie(Lies {
        record: Some(Arc::new(move |launch, args| if launch == at as usize { damaged.args.to_vec() } else { args.to_vec() })),
        node: Some(Arc::new(move |graph, id| if id.0 == at { Ok(Node::Kernel(truth.clone())) } else { graph.node(id) })),
        ..Lies::default()
    });
    rig.executor.capture(|_| ())?;
    rig.liar.lie(Lies::default());
    rig.open(20)?;
    Ok(rig)
}

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
