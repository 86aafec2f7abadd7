//! Replay latency: what a decode step costs the host, and when its result is seen.

use std::time::Instant;

use serde::Serialize;

use super::workload::quantile;
use crate::error::Result;
use crate::runtime::{Executor, Sampling, SequenceId, SequenceStep};

/// Times of one batch size, microseconds.
#[derive(Clone, Debug, Serialize)]
pub struct ReplayLatency {
    /// Live rows.
    pub rows: u32,
    /// Rows of the graph that replays; 0 if the step runs eagerly.
    pub capture_rows: u32,
    /// Nodes of the graph or launches of the eager step.
    pub nodes: usize,
    /// Host time of `decode`, median.
    pub submit_us: f64,
    /// Host time of `decode`, 99th percentile.
    pub submit_p99_us: f64,
    /// From the call of `decode` to the result read, median; `None` on a device that runs nothing.
    pub visible_us: Option<f64>,
    /// The same, 99th percentile.
    pub visible_p99_us: Option<f64>,
}

/// Sequences of one length that can be stepped in place again and again.
pub struct Probe {
    ids: Vec<SequenceId>,
    kv_len: u32,
}

impl Probe {
    /// Opens `rows` sequences of `kv_len` tokens. Their caches hold zeros: the time of a step does not depend on values.
    pub fn open(executor: &mut Executor, rows: u32, kv_len: u32) -> Result<Probe> {
        let block_size = executor.chains().step_layout().block_size;
        let blocks = kv_len.div_ceil(block_size);
        let mut ids = Vec::with_capacity(rows as usize);
        for row in 0..rows {
            let id = executor.open_sequence()?;
            executor.grant_blocks(id, &(row * blocks..(row + 1) * blocks).collect::<Vec<_>>())?;
            ids.push(id);
        }
        Ok(Probe { ids, kv_len })
    }

    /// Closes them.
    pub fn close(self, executor: &mut Executor) -> Result<()> {
        self.ids.into_iter().try_for_each(|id| executor.close_sequence(id, |_| ()))
    }

    /// Steps `count` times; one entry a step: (submit, visible) in microseconds.
    pub fn step(&self, executor: &mut Executor, count: usize) -> Result<Vec<(f64, f64)>> {
        let executes = executor.arena().device().info().executes;
        let batch: Vec<_> = self
            .ids
            .iter()
            .map(|&sequence| SequenceStep { sequence, tokens: &[1], kv_len: self.kv_len, sampling: Sampling::GREEDY })
            .collect();
        let mut times = Vec::with_capacity(count);
        for _ in 0..count {
            for &id in &self.ids {
                let held = executor.sequences().get(id)?.kv_len;
                executor.truncate_sequence(id, held.min(self.kv_len - 1))?;
                if held < self.kv_len - 1 {
                    executor.assume_cached(id, self.kv_len - 1)?;
                }
            }
            let started = Instant::now();
            let ticket = executor.decode(&batch)?;
            let submitted = started.elapsed();
            if executes {
                executor.wait(ticket)?;
            } else {
                executor.drain()?;
            }
            times.push((submitted.as_secs_f64() * 1e6, started.elapsed().as_secs_f64() * 1e6));
        }
        Ok(times)
    }
}

/// Measures `count` decode steps of `rows` rows at `kv_len` tokens, after a tenth as many to warm up.
pub fn replay_latency(executor: &mut Executor, rows: u32, kv_len: u32, count: usize) -> Result<ReplayLatency> {
    let probe = Probe::open(executor, rows, kv_len)?;
    probe.step(executor, count / 10 + 1)?;
    let times = probe.step(executor, count)?;
    probe.close(executor)?;
    let (mut submit, mut visible): (Vec<f64>, Vec<f64>) = times.into_iter().unzip();
    let executes = executor.arena().device().info().executes;
    let query_len = 1 + executor.chains().limits().num_speculative_tokens;
    let graph = executor.graphs().pick(query_len, rows, kv_len);
    let nodes = match graph {
        Some(graph) => graph.launches().len(),
        None => executor.chains().decode(&executor.eager_key(query_len, rows)).ops.len(),
    };
    Ok(ReplayLatency {
        rows,
        capture_rows: graph.map_or(0, |graph| graph.key().rows()),
        nodes,
        submit_us: quantile(&mut submit, 0.5),
        submit_p99_us: quantile(&mut submit, 0.99),
        visible_us: executes.then(|| quantile(&mut visible, 0.5)),
        visible_p99_us: executes.then(|| quantile(&mut visible, 0.99)),
    })
}
