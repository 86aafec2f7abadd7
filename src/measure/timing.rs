//! Times and contents of a captured graph's nodes.

use super::Probe;
use super::workload::quantile;
use crate::chain::GraphKey;
use crate::dump::tensors::Tensor;
use crate::dump::trace::Times;
use crate::dump::{DeviceSection, Dump, NodeTime};
use crate::error::{Error, Result};
use crate::invariant::ranges::{NodeRange, ranges};
use crate::kernels::Access;
use crate::random::Random;
use crate::runtime::{Executor, SequenceStep, Source};

/// The largest KV length that a full batch of `key` can have in this executor's cache.
pub fn longest(executor: &Executor, key: &GraphKey) -> u32 {
    let layout = executor.chains().step_layout();
    key.kv_len_max.min(layout.cache_blocks / key.sequences * layout.block_size)
}

/// Adds the device section to a dump: each node's median time over `count` steps of a full batch of `kv_len` tokens. Gives the
/// times of the last step, and of one replay.
///
/// Errors: the device runs nothing; `kv_len` does not fit the cache.
pub fn time(executor: &mut Executor, dump: &mut Dump, kv_len: u32, count: usize) -> Result<Times> {
    let key = dump.key;
    let probe = probe(executor, &key, kv_len)?;
    probe.run(executor, 2)?;
    let mut steps = Vec::with_capacity(count);
    for _ in 0..count.max(1) {
        probe.rewind(executor)?;
        steps.push(executor.time_nodes(probe.batch(), &key)?);
    }
    probe.rewind(executor)?;
    let replay = executor.time_replay(probe.batch())?;
    probe.close(executor)?;
    let median = |at: usize| quantile(&mut steps.iter().map(|step| step[at].us).collect::<Vec<_>>(), 0.5);
    let nodes = dump.nodes.iter().enumerate();
    let nodes = nodes.map(|(at, node)| NodeTime { us: median(at), bytes: node.declared_bytes() }).collect();
    let info = executor.arena().device().info();
    dump.device = Some(DeviceSection {
        platform: info.platform.to_string(),
        name: info.name.clone(),
        arch: info.arch.clone(),
        driver: info.driver.clone(),
        nodes,
    });
    let last = steps.last().expect("invariant: at least one step was timed");
    let nodes = last.iter().map(|span| (span.start_us, span.us)).collect();
    Ok(Times { submit_us: replay.submit_us, replay_us: replay.device_us, nodes })
}

fn probe(executor: &mut Executor, key: &GraphKey, kv_len: u32) -> Result<Probe> {
    if !executor.arena().device().info().executes {
        return Err(Error::unavailable("the null device records and runs nothing: there is nothing to time or to read")
            .help("use --device cpu, hip or cuda"));
    }
    let most = longest(executor, key);
    if key.query_len != 1 || kv_len == 0 || kv_len > most {
        return Err(Error::config(format!("{kv_len} tokens in each of {} sequences of {key}: at most {most}", key.sequences))
            .help("lower --kv-len, or raise --cache-blocks; graphs of one token a sequence can be timed"));
    }
    Probe::open(executor, key.sequences, kv_len)
}

/// Prefills the first `kv_len` tokens of each sequence with random ones, drawn from `seed`.
pub fn prefill(executor: &mut Executor, batch: &[SequenceStep<'_>], kv_len: u32, seed: u64) -> Result<()> {
    let mut random = Random::new(seed);
    let (vocab, most) = (executor.chains().vocab(), executor.chains().limits().max_num_batched_tokens);
    for step in batch {
        for from in (0..kv_len).step_by(most as usize) {
            let to = kv_len.min(from + most);
            let tokens: Vec<i32> = (from..to).map(|_| random.range(0, vocab - 1) as i32).collect();
            let ticket = executor.prefill(&[SequenceStep { tokens: &tokens, kv_len: to, ..*step }])?;
            executor.wait(ticket)?;
        }
    }
    Ok(())
}

/// Prefills a full batch with random tokens of `seed`, takes one step of `key`, node by node, and reads `wanted` buffers after the nodes they are wanted of: (buffer, node). The
/// part the node touches, or all of a buffer it does not touch. Tensors are named `BUFFER@NODE`.
///
/// Errors: no such buffer or node; the device runs nothing.
pub fn tensors(
    executor: &mut Executor,
    key: &GraphKey,
    kv_len: u32,
    seed: u64,
    wanted: &[(String, String)],
) -> Result<Vec<Tensor>> {
    let chain = executor.chains().decode(key);
    let touched = ranges(&chain, |_| true);
    let mut places = Vec::new();
    for (buffer, node) in wanted {
        let plan = executor.arena().plan();
        let id = plan
            .find(buffer)
            .ok_or_else(|| Error::config(format!("no buffer {buffer}")).help("capstan plan and capstan dump list the buffers"))?;
        let op = chain
            .ops
            .iter()
            .position(|op| op.label == *node)
            .ok_or_else(|| Error::config(format!("no node {node}")).help("capstan dump lists the nodes"))?;
        let planned = plan.buffer(id);
        let whole = NodeRange {
            op,
            field: "",
            access: Access::Read,
            buffer: id,
            offset: 0,
            bytes: planned.bytes,
            dtype: planned.spec.dtype,
        };
        let own = touched.iter().find(|range| range.op == op && range.buffer == id).cloned();
        places.push((format!("{buffer}@{node}"), own.unwrap_or(whole)));
    }
    let probe = probe(executor, key, kv_len)?;
    prefill(executor, probe.batch(), kv_len - 1, seed)?;
    let mut walk = executor.walk_decode(probe.batch(), key, Source::Graph)?;
    let mut found = Vec::new();
    while let Some(at) = executor.walk_next(&mut walk)? {
        for (name, range) in places.iter().filter(|(_, range)| range.op == at) {
            let contents = executor.read_ranges(std::slice::from_ref(range))?;
            found.push(Tensor::of_range(name.clone(), executor.arena().plan(), range, &contents[0]));
        }
    }
    executor.walk_end(walk, probe.batch())?;
    probe.close(executor)?;
    Ok(found)
}
