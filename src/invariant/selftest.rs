//! The self-test at start: replays of small graphs whose results are known in closed form.
//!
//! It looks for what runtimes got wrong without an error: late nodes of a long graph that run on stale pointers, buffers written
//! right before a launch that are read stale, replays that run another graph, instances that go bad. A fault names the public
//! report whose symptom it shows. Takes well under a second; a few hundred KiB of device memory, freed at the end.

use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;

use super::issues::{self, KnownIssue};
use super::probes::{Map, Probes, WORDS, input};
use crate::arena::BufferId;
use crate::capture::CapturedGraph;
use crate::error::{Error, ErrorKind, Result};
use crate::hal::Device;
use crate::random::Random;

/// Nodes of the long graph: past every length that a public report names.
const CHAIN_NODES: u32 = 512;
/// Replays of the long graph, each on other data.
const CHAIN_REPLAYS: u32 = 32;
/// Launches right after a write, each of other data.
const INGESTS: u32 = 1000;
/// Rounds of two graphs in turn, and launches of a round.
const ROUNDS: u32 = 16;
const ROUND_LAUNCHES: u32 = 64;
/// Instances made of one recorded graph, and recordings of it.
const INSTANCES: u32 = 16;

/// What the self-test of a device found.
#[derive(Clone, Debug, Serialize)]
pub struct SelfTestReport {
    /// The device's marketing name.
    pub device: String,
    /// Its compiler target.
    pub arch: String,
    /// Its driver's version.
    pub driver: String,
    /// Every check, in order.
    pub checks: Vec<SelfTestCheck>,
    /// Device memory that instances and recordings kept after they were dropped, bytes. Other processes on the device disturb it.
    pub kept_bytes: u64,
}

/// One check.
#[derive(Clone, Debug, Serialize)]
pub struct SelfTestCheck {
    /// `long_chain`, `pinned_ingest`, `copied_ingest`, `alternation`, `reinstantiation`.
    pub name: &'static str,
    /// Replays that were held against known results.
    pub replays: u32,
    /// Wall time, seconds.
    pub seconds: f64,
    /// What went wrong; `None` if nothing did.
    pub fault: Option<SelfTestFault>,
}

/// A wrong result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SelfTestFault {
    /// What was found and what was expected.
    pub message: String,
    /// The public report with this symptom.
    pub issue: KnownIssue,
}

impl SelfTestReport {
    /// True if every result was right.
    pub fn passed(&self) -> bool {
        self.checks.iter().all(|check| check.fault.is_none())
    }

    /// An error of kind [`Device`](ErrorKind::Device) that names the first fault and its public report, if there is one.
    pub fn require(&self) -> Result<()> {
        let fault = self.checks.iter().find_map(|check| Some((check.name, check.fault.as_ref()?)));
        let Some((name, SelfTestFault { message, issue })) = fault else { return Ok(()) };
        let SelfTestReport { device, arch, driver, .. } = self;
        Err(Error::device(format!("{device} ({arch}, driver {driver}) replays graphs wrong: {name}: {message}"))
            .help(format!("see {}: {}; use another driver version, or run eagerly", issue.id, issue.symptom)))
    }
}

/// Replays graphs with known results on `device`.
///
/// A wrong result is a fault in the report ([`SelfTestReport::require`] makes an error of it). Errors: a device call failed; the
/// device runs nothing ([`Unavailable`](ErrorKind::Unavailable)).
pub fn self_test(device: &Arc<dyn Device>) -> Result<SelfTestReport> {
    let info = device.info();
    if !info.executes {
        return Err(Error::unavailable(format!("{} records and runs nothing: there is no result to check", info.name))
            .help("run the self-test on cpu, hip or cuda"));
    }
    let mut kept_bytes = 0;
    let checks = vec![
        check("long_chain", CHAIN_REPLAYS, || long_chain(device))?,
        check("pinned_ingest", INGESTS, || ingest(device, Source::Pinned))?,
        check("copied_ingest", INGESTS, || ingest(device, Source::Copied))?,
        check("alternation", ROUNDS * ROUND_LAUNCHES, || alternation(device))?,
        check("reinstantiation", 2 * INSTANCES, || reinstantiation(device, &mut kept_bytes))?,
    ];
    let (device, arch, driver) = (info.name.clone(), info.arch.clone(), info.driver.clone());
    let report = SelfTestReport { device, arch, driver, checks, kept_bytes };
    for SelfTestCheck { name, fault, .. } in &report.checks {
        if let Some(SelfTestFault { message, issue }) = fault {
            tracing::error!(check = name, issue = issue.id, "self-test: {message}");
        }
    }
    Ok(report)
}

/// Runs one check. A graph that does not hold what was recorded is a fault, not an error.
fn check(name: &'static str, replays: u32, run: impl FnOnce() -> Result<Option<SelfTestFault>>) -> Result<SelfTestCheck> {
    let started = Instant::now();
    let fault = match run() {
        Err(error) if matches!(error.kind(), ErrorKind::Invariant("CAP-1" | "CAP-2")) => {
            Some(SelfTestFault { message: error.message().into(), issue: issues::SWALLOWED_ERRORS })
        }
        Err(error) if matches!(error.kind(), ErrorKind::Invariant("ADDR-1" | "ADDR-4")) => {
            Some(SelfTestFault { message: error.message().into(), issue: issues::UNSTABLE_ADDRESSES })
        }
        other => other?,
    };
    Ok(SelfTestCheck { name, replays, seconds: started.elapsed().as_secs_f64(), fault })
}

/// Node `i` maps buffer `i` into buffer `i + 1`, so that every intermediate result is there when the last is wrong.
fn long_chain(device: &Arc<dyn Device>) -> Result<Option<SelfTestFault>> {
    let probes = Probes::new(device, CHAIN_NODES + 1, 0)?;
    let map = |node: u32| Map { mul: 2 * node + 3, add: node.wrapping_mul(0x0101_0101) ^ 7 };
    let steps = (0..CHAIN_NODES).map(|node| (BufferId(node), map(node), BufferId(node + 1)));
    let graph = probes.capture("long_chain", steps)?;
    let whole = (0..CHAIN_NODES).fold(Map::IDENTITY, |all, node| all.then(map(node)));
    for round in 0..CHAIN_REPLAYS {
        let input = input(round);
        probes.write(BufferId(0), &input)?;
        graph.replay(&*probes.stream)?;
        if first_wrong(&probes.read(BufferId(CHAIN_NODES))?, &input, whole).is_none() {
            continue;
        }
        return locate_in_chain(&probes, round, map).map(Some);
    }
    Ok(None)
}

/// The first node whose output is not its map of the known input.
fn locate_in_chain(probes: &Probes, round: u32, map: impl Fn(u32) -> Map) -> Result<SelfTestFault> {
    let input = input(round);
    let mut prefix = Map::IDENTITY;
    for node in 0..CHAIN_NODES {
        prefix = prefix.then(map(node));
        let Some(wrong) = first_wrong(&probes.read(BufferId(node + 1))?, &input, prefix) else { continue };
        let issue = match node {
            0 => issues::STALE_BEFORE_LAUNCH,
            // The report says "about 200"; a fault well before that looks like something else.
            1..150 => issues::CORRUPT_REPLAY,
            _ => issues::STALE_PAST_200_NODES,
        };
        let message = format!("node {node} of {CHAIN_NODES}, replay {round}: {wrong}");
        return Ok(SelfTestFault { message, issue });
    }
    let message = format!("replay {round} of {CHAIN_NODES} nodes was read wrong once and right again");
    Ok(SelfTestFault { message, issue: issues::CORRUPT_REPLAY })
}

/// How data gets to the device right before a launch.
#[derive(Clone, Copy)]
enum Source {
    /// The host writes pinned memory, last word last, as the step ring does.
    Pinned,
    /// A host-to-device copy.
    Copied,
}

/// Writes other data before every launch; the graph reads it at once and answers in pinned memory.
fn ingest(device: &Arc<dyn Device>, source: Source) -> Result<Option<SelfTestFault>> {
    let probes = Probes::new(device, 2, 2)?;
    let (copied, between, pinned, answer) = (BufferId(0), BufferId(1), BufferId(2), BufferId(3));
    let (first, second) = (Map { mul: 5, add: 11 }, Map { mul: 7, add: 13 });
    let from = match source {
        Source::Pinned => pinned,
        Source::Copied => copied,
    };
    let graph = probes.capture("ingest", [(from, first, between), (between, second, answer)])?;
    let (slot, answers) = (probes.arena.pinned(pinned)?, probes.arena.pinned(answer)?);
    let whole = first.then(second);
    let mut found = vec![0u32; WORDS];
    for round in 0..INGESTS {
        let words = input(round);
        match source {
            Source::Pinned => {
                let (head, last) = words.split_at(WORDS - 2);
                slot.write(0, bytemuck::cast_slice(head));
                slot.store_release(size_of_val(head) as u64, u64::from(last[1]) << 32 | u64::from(last[0]));
            }
            Source::Copied => probes.write(copied, &words)?,
        }
        graph.replay(&*probes.stream)?;
        probes.stream.synchronize()?;
        answers.read(0, bytemuck::cast_slice_mut(&mut found));
        let Some(wrong) = first_wrong(&found, &words, whole) else { continue };
        let before = input(round.wrapping_sub(1));
        let stale = found[wrong.at] == whole.apply(before[wrong.at]);
        let (what, issue) =
            if stale { (", which is the write before's", issues::STALE_BEFORE_LAUNCH) } else { ("", issues::CORRUPT_REPLAY) };
        return Ok(Some(SelfTestFault { message: format!("launch {round} right after a write: {wrong}{what}"), issue }));
    }
    Ok(None)
}

/// Two graphs that do not commute, launched in a random order without waiting.
fn alternation(device: &Arc<dyn Device>) -> Result<Option<SelfTestFault>> {
    let probes = Probes::new(device, 2, 0)?;
    let (state, between) = (BufferId(0), BufferId(1));
    let halves = [[Map { mul: 3, add: 1 }, Map { mul: 9, add: 5 }], [Map { mul: 5, add: 2 }, Map { mul: 11, add: 8 }]];
    let graphs = ["first", "second"].iter().zip(halves);
    let graphs = graphs.map(|(name, [a, b])| probes.capture(name, [(state, a, between), (between, b, state)]));
    let graphs: Vec<CapturedGraph> = graphs.collect::<Result<_>>()?;
    let maps = halves.map(|[a, b]| a.then(b));
    let mut random = Random::new(0x5e1f);
    for round in 0..ROUNDS {
        let input = input(round);
        let order: Vec<usize> = (0..ROUND_LAUNCHES).map(|_| random.range(0, 1) as usize).collect();
        probes.write(state, &input)?;
        for &which in &order {
            graphs[which].replay(&*probes.stream)?;
        }
        let whole = order.iter().fold(Map::IDENTITY, |all, &which| all.then(maps[which]));
        let Some(wrong) = first_wrong(&probes.read(state)?, &input, whole) else { continue };
        let message = format!("round {round}, {ROUND_LAUNCHES} launches of two graphs in turn: {wrong}");
        return Ok(Some(SelfTestFault { message, issue: issues::CORRUPT_REPLAY }));
    }
    Ok(None)
}

/// New instances of one recorded graph, and new recordings of one chain; each must still compute the same.
fn reinstantiation(device: &Arc<dyn Device>, kept_bytes: &mut u64) -> Result<Option<SelfTestFault>> {
    let probes = Probes::new(device, 2, 0)?;
    let map = Map { mul: 3, add: 0x1234_5677 };
    let steps = || (0..64).map(|node| (BufferId(node % 2), map, BufferId((node + 1) % 2)));
    let whole = (0..64).fold(Map::IDENTITY, |all, _| all.then(map));
    let mut graph = probes.capture("instance", steps())?;
    let mut free_bytes = None;
    for round in 0..2 * INSTANCES {
        let recorded = round % 2 == 1;
        if recorded {
            graph = probes.capture("instance", steps())?;
        } else {
            graph.reinstantiate(&*probes.stream)?;
        }
        let input = input(round);
        probes.write(BufferId(0), &input)?;
        graph.replay(&*probes.stream)?;
        if let Some(wrong) = first_wrong(&probes.read(BufferId(0))?, &input, whole) {
            let what = if recorded { "recording" } else { "instance" };
            let message = format!("{what} {} of one chain: {wrong}", round / 2);
            return Ok(Some(SelfTestFault { message, issue: issues::CORRUPT_REPLAY }));
        }
        // The first ones may fill caches of the runtime; from then on memory has to come back.
        if round == 3 {
            free_bytes = Some(device.memory()?.free_bytes);
        }
    }
    *kept_bytes = free_bytes.unwrap_or_default().saturating_sub(device.memory()?.free_bytes);
    if *kept_bytes > 0 {
        let issue = issues::GRAPH_MEMORY;
        tracing::warn!(bytes = *kept_bytes, issue = issue.id, "device memory did not come back after graphs were dropped");
    }
    Ok(None)
}

/// The first word that is not `map` of its input.
struct Wrong {
    at: usize,
    found: u32,
    expected: u32,
}

impl std::fmt::Display for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "word {} is {:#010x}, expected {:#010x}", self.at, self.found, self.expected)
    }
}

fn first_wrong(found: &[u32], input: &[u32], map: Map) -> Option<Wrong> {
    let words = found.iter().zip(input).enumerate();
    words
        .map(|(at, (&found, &input))| Wrong { at, found, expected: map.apply(input) })
        .find(|wrong| wrong.found != wrong.expected)
}
