//! A graph whose node holds something else than the driver said when it was captured.

use std::sync::Arc;

use capstan::hal::{Node, NodeId};
use capstan::{Error, Result};

use super::liar::Lies;
use super::rig::{Rig, msa, scalar};

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
    Ok(rig)
}
