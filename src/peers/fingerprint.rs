//! What the ranks compare of their chains before the first replay: everything but the rank itself.

use std::fmt::Write;

use crate::arena::ArenaPlan;
use crate::chain::{Chain, Op};
use crate::error::{Error, Result};
use crate::kernels::FieldKind;

use super::{Group, group};

/// Scalars that say which rank this is.
const OF_THE_RANK: [&str; 2] = ["rank", "first_head"];

/// An op in names, shapes, scalars and offsets, the same on every rank of a group: a peer's buffer goes by its owner's rank,
/// this rank's own among them.
pub fn normalised(op: &Op, plan: &ArenaPlan, rank: u32) -> String {
    let mut text = format!("{} {} {:?}", op.label, op.kernel.symbol, op.shape);
    for field in op.kernel.args.fields {
        let _ = match field.kind {
            FieldKind::Scalar(_) if OF_THE_RANK.contains(&field.name) => Ok(()),
            FieldKind::Scalar(_) => write!(text, " {}={}", field.name, field.scalar_text(&op.args).unwrap_or_default()),
            FieldKind::Pointer { .. } => {
                let extent = field.extent_bytes(&op.args);
                match field.pointer(&op.args).as_symbol() {
                    None => write!(text, " {}=null", field.name),
                    Some((buffer, offset)) => {
                        let name = plan.buffers.get(buffer as usize).map_or("?", |planned| &planned.spec.name);
                        let shared = plan.find(&format!("peer{}/{name}", u32::from(rank == 0))).is_some();
                        let owner = if shared { format!("peer{rank}/") } else { String::new() };
                        write!(text, " {}={owner}{name}+{offset}:{extent}", field.name)
                    }
                }
            }
        };
    }
    text
}

/// FNV-1a over every op's [`normalised`] text.
pub fn fingerprint(chain: &Chain, plan: &ArenaPlan, rank: u32) -> u64 {
    let texts = chain.ops.iter().map(|op| normalised(op, plan, rank));
    texts.fold(0xcbf2_9ce4_8422_2325, |hash, text| {
        text.bytes().chain([0]).fold(hash, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
    })
}

/// RANK-1 before the first replay: every rank's chain is this one, but for the rank.
///
/// Errors: it is not; names the first op that differs, on every rank.
pub fn agree_on_chain(group: &dyn Group, what: &str, chain: &Chain, plan: &ArenaPlan) -> Result<()> {
    let own = fingerprint(chain, plan, group.rank()).to_be_bytes();
    let all = group.all_gather(what, &own)?;
    if all.iter().all(|other| **other == own) {
        return Ok(());
    }
    let texts: Vec<String> = chain.ops.iter().map(|op| normalised(op, plan, group.rank())).collect();
    let all = group.all_gather(&format!("{what}: ops"), texts.join("\n").as_bytes())?;
    let ours = texts.join("\n");
    for (rank, theirs) in all.iter().enumerate() {
        let theirs = String::from_utf8_lossy(theirs);
        let pairs = ours.lines().map(Some).chain(std::iter::repeat(None));
        let pairs = pairs.zip(theirs.lines().map(Some).chain(std::iter::repeat(None)));
        let differing = pairs.take_while(|(a, b)| a.is_some() || b.is_some()).find(|(a, b)| a != b);
        if let Some((a, b)) = differing {
            let (a, b) = (a.unwrap_or("no op"), b.unwrap_or("no op"));
            let message = format!("{what}: rank {} has {a:?}, rank {rank} has {b:?}", group.rank());
            return Err(Error::invariant("RANK-1", message).help("give every rank the same model, limits and capture sizes"));
        }
    }
    Err(group::absent(what, group.rank(), 0.0))
}
