//! Replay latency: what a decode step costs the host, and when its result is seen.

use std::time::Instant;

use serde::Serialize;

use super::workload::quantile;
use crate::error::Result;
use crate::runtime::{Executor, Sampling, SequenceStep};

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
#[derive(Debug)]
pub struct Probe {
    batch: Vec<SequenceStep<'static>>,
    kv_len: u32,
}

impl Probe {
    /// Opens `rows` sequences of `kv_len` tokens. Their caches hold zeros: the time of a step does not depend on values.
    pub fn open(executor: &mut Executor, rows: u32, kv_len: u32) -> Result<Probe> {
        let block_size = executor.chains().step_layout().block_size;
        let blocks = kv_len.div_ceil(block_size);
        let mut batch = Vec::with_capacity(rows as usize);
        for row in 0..rows {
            let id = executor.open_sequence()?;
            executor.grant_blocks(id, &(row * blocks..(row + 1) * blocks).collect::<Vec<_>>())?;
            batch.push(SequenceStep { sequence: id, tokens: &[1], kv_len, sampling: Sampling::GREEDY });
        }
        Ok(Probe { batch, kv_len })
    }

    /// Closes them.
    pub fn close(self, executor: &mut Executor) -> Result<()> {
        self.batch.into_iter().try_for_each(|step| executor.close_sequence(step.sequence, |_| ()))
    }

    /// Steps `count` times.
    pub fn run(&self, executor: &mut Executor, count: usize) -> Result<()> {
        (0..count).try_for_each(|_| self.step(executor).map(drop))
    }

    /// Steps `count` times; one entry a step: (submit, visible) in microseconds.
    pub fn time(&self, executor: &mut Executor, count: usize) -> Result<Vec<(f64, f64)>> {
        (0..count).map(|_| self.step(executor)).collect()
    }

    /// One step, in place: the last token is decoded again. Allocates nothing.
    pub fn step(&self, executor: &mut Executor) -> Result<(f64, f64)> {
        self.rewind(executor)?;
        let started = Instant::now();
        let ticket = executor.decode(&self.batch)?;
        let submitted = started.elapsed();
        if executor.arena().device().info().executes {
            executor.wait(ticket)?;
        } else {
            executor.drain()?;
        }
        Ok((submitted.as_secs_f64() * 1e6, started.elapsed().as_secs_f64() * 1e6))
    }

    /// The batch of one step.
    pub fn batch(&self) -> &[SequenceStep<'static>] {
        &self.batch
    }

    /// Takes the last token back, so that the batch can be decoded again.
    pub fn rewind(&self, executor: &mut Executor) -> Result<()> {
        for step in &self.batch {
            let held = executor.sequences().get(step.sequence)?.kv_len;
            executor.truncate_sequence(step.sequence, held.min(self.kv_len - 1))?;
            if held < self.kv_len - 1 {
                executor.assume_cached(step.sequence, self.kv_len - 1)?;
            }
        }
        Ok(())
    }
}

/// Measures `count` decode steps of `rows` rows at `kv_len` tokens, after a tenth as many to warm up.
pub fn replay_latency(executor: &mut Executor, rows: u32, kv_len: u32, count: usize) -> Result<ReplayLatency> {
    let probe = Probe::open(executor, rows, kv_len)?;
    probe.run(executor, count / 10 + 1)?;
    let times = probe.time(executor, count)?;
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
