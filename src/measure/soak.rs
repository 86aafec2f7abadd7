//! Soak: thousands of replays and many re-captures, and the memory that is gone afterwards.
//!
//! A leak of a runtime is small a graph and shows only after many. The first rounds fill pools that live as long as the process;
//! what is held after them is the base that the end is compared with.

use serde::Serialize;

use super::{Probe, resident_bytes};
use crate::config::ByteCount;
use crate::error::{Error, Result};
use crate::runtime::Executor;

/// Rounds before the base is taken.
const SETTLING_ROUNDS: u32 = 8;

/// How long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Soak {
    /// Replays in all, spread over the rounds.
    pub replays: u32,
    /// Rounds: each replays, then captures every size anew.
    pub recaptures: u32,
    /// Live rows of a step.
    pub rows: u32,
    /// Tokens a sequence holds.
    pub kv_len: u32,
}

impl Soak {
    /// 10,000 replays and 100 re-captures.
    pub const FULL: Soak = Soak { replays: 10_000, recaptures: 100, rows: 4, kv_len: 64 };
}

/// Memory at one time, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemorySample {
    /// Re-captures so far.
    pub recaptures: u32,
    /// Free memory of the device, by its own count.
    pub device_free_bytes: u64,
    /// Resident memory of this process; `None` where the system does not tell.
    pub resident_bytes: Option<u64>,
}

/// What a soak left behind.
#[derive(Clone, Debug, Serialize)]
pub struct SoakReport {
    /// What was run, settling rounds not counted.
    pub soak: Soak,
    /// Device memory held at the end beyond the base, bytes; negative if some came back.
    pub device_delta_bytes: i64,
    /// The same for this process's resident memory.
    pub resident_delta_bytes: Option<i64>,
    /// The base, three times on the way and the end.
    pub samples: Vec<MemorySample>,
}

/// Replays and captures anew, over and over. `progress` hears of every round: done, all.
///
/// Errors: whatever capture and replay report.
pub fn soak(executor: &mut Executor, soak: Soak, mut progress: impl FnMut(u32, u32)) -> Result<SoakReport> {
    let probe = Probe::open(executor, soak.rows, soak.kv_len)?;
    let replays = (soak.replays / soak.recaptures.max(1)) as usize;
    let round = |executor: &mut Executor, extra: usize| -> Result<()> {
        probe.run(executor, replays + extra)?;
        executor.capture(|_| ()).map(drop)
    };
    for _ in 0..SETTLING_ROUNDS {
        round(executor, 0)?;
    }
    let mut samples = vec![sample(executor, 0)?];
    for done in 1..=soak.recaptures {
        // What does not divide evenly goes to the last round.
        let extra = if done == soak.recaptures { soak.replays as usize - replays * soak.recaptures as usize } else { 0 };
        round(executor, extra)?;
        progress(done, soak.recaptures);
        if (1..=4).any(|quarter| done == soak.recaptures * quarter / 4) {
            samples.push(sample(executor, done)?);
        }
    }
    probe.close(executor)?;
    let (base, end) = (samples[0], samples[samples.len() - 1]);
    let resident = base.resident_bytes.zip(end.resident_bytes);
    Ok(SoakReport {
        soak,
        device_delta_bytes: base.device_free_bytes as i64 - end.device_free_bytes as i64,
        resident_delta_bytes: resident.map(|(base, end)| end as i64 - base as i64),
        samples,
    })
}

fn sample(executor: &Executor, recaptures: u32) -> Result<MemorySample> {
    let device_free_bytes = executor.arena().device().memory()?.free_bytes;
    Ok(MemorySample { recaptures, device_free_bytes, resident_bytes: resident_bytes() })
}

impl SoakReport {
    /// Refuses a soak that kept device memory at all, or more than `resident_tolerance_bytes` of this process's: allocators and
    /// the system keep some pages.
    ///
    /// Errors: of kind [`Memory`](crate::error::ErrorKind::Memory), with what a re-capture kept.
    pub fn require_none_kept(&self, resident_tolerance_bytes: u64) -> Result<()> {
        let kept = |what: &str, bytes: i64| {
            let Soak { replays, recaptures, .. } = self.soak;
            let each = ByteCount(bytes as u64 / u64::from(recaptures.max(1)));
            let bytes = ByteCount(bytes as u64);
            Error::memory(format!(
                "{replays} replays and {recaptures} re-captures kept {bytes} of {what}, {each} a re-capture: {:?}",
                self.samples
            ))
            .help("capture once and keep the graphs; see whether another version of the driver gives memory back")
        };
        if self.device_delta_bytes > 0 {
            return Err(kept("device memory", self.device_delta_bytes));
        }
        match self.resident_delta_bytes {
            Some(bytes) if bytes > 0 && bytes as u64 > resident_tolerance_bytes => Err(kept("resident memory", bytes)),
            _ => Ok(()),
        }
    }
}
