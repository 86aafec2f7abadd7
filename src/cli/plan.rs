//! `capstan plan`: every persistent buffer, the sums by purpose, the ladder and the gates. No device.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use super::ladder::Advice;
use super::table::table;
use super::{Shared, print};
use crate::arena::{ArenaPlan, PlannedBuffer, Purpose};
use crate::capture::Ladder;
use crate::chain::{MsaChains, StepChains};
use crate::config::{ByteCount, CacheBudget, Limits, ModelShape};
use crate::dtype::DType;
use crate::error::Result;
use crate::gates::{self, Indexer, Refusal, Sharing};
use crate::hal::{MemoryKind, Platform};
use crate::model::{M3Chains, M3Plan};
use crate::planning::{AttentionDims, MsaPlan, check_fit, device_bytes};

/// Flags of `capstan plan`.
#[derive(Debug, Args)]
pub(super) struct PlanArgs {
    #[command(flatten)]
    shared: Shared,
    /// Which chain to plan for
    #[arg(long, value_enum, default_value_t = ChainChoice::Msa, value_name = "CHAIN")]
    chain: ChainChoice,
    /// List the buffers of every layer instead of folding layers that look alike
    #[arg(long)]
    all: bool,
    /// Batch rows of recorded traffic: lines of `rows steps`, or the output of `capstan run --json`. Proposes capture sizes
    #[arg(long, value_name = "FILE")]
    batch_histogram: Option<PathBuf>,
    /// Graph memory that one percent of padded rows is worth [default: 64MiB]
    #[arg(long, value_name = "BYTES", value_parser = ByteCount::from_str, requires = "batch_histogram")]
    padding_worth: Option<ByteCount>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ChainChoice {
    /// The sparse-attention layers alone
    Msa,
    /// The whole decode step, bf16 weights included
    M3,
}

/// What the command shows.
struct Report {
    chain: ChainChoice,
    shape: ModelShape,
    limits: Limits,
    dims: AttentionDims,
    arena: ArenaPlan,
    cache_blocks: u32,
    ladder: Ladder,
    memory: Option<u64>,
    advice: Option<Advice>,
}

pub(super) fn run(args: &PlanArgs) -> Result<()> {
    let shape = args.shared.shape()?;
    let (limits, memory) = args.shared.limits(&shape)?;
    // Without a device the dearest platform's graphs are kept room for.
    let platform = args.shared.device.platform().unwrap_or(Platform::Hip);
    let limits = args.shared.keep_for_graphs(limits, &shape, platform, |limits| chains(args.chain, &shape, limits))?;
    let (arena, cache_blocks) = plan(args.chain, &shape, &limits)?;
    if let Some(memory) = memory {
        let with_blocks = |limits: &Limits, blocks| {
            let limits = Limits { cache: CacheBudget::Blocks(blocks), ..limits.clone() };
            Ok(plan(args.chain, &shape, &limits)?.0)
        };
        check_fit(&limits, shape.block_size, memory, with_blocks)?;
    }
    let ladder = Ladder::new(&limits)?;
    let dims = match args.chain {
        ChainChoice::Msa => AttentionDims::new(&shape, &limits),
        ChainChoice::M3 => AttentionDims::replicated(&shape, &limits),
    };
    let advice = match &args.batch_histogram {
        None => None,
        Some(file) => Some(Advice::new(file, &*chains(args.chain, &shape, &limits)?, platform, args.padding_worth)?),
    };
    let report = Report { chain: args.chain, shape, limits, dims, arena, cache_blocks, ladder, memory, advice };
    let text = if args.shared.json { format!("{:#}", report.json()) } else { report.text(args.all) };
    print(&text)
}

fn plan(chain: ChainChoice, shape: &ModelShape, limits: &Limits) -> Result<(ArenaPlan, u32)> {
    match chain {
        ChainChoice::Msa => MsaPlan::new(shape, limits).map(|plan| (plan.arena, plan.layout.cache_blocks)),
        ChainChoice::M3 => M3Plan::new(shape, limits, |_| DType::Bf16).map(|plan| (plan.arena, plan.layout.cache_blocks)),
    }
}

fn chains(chain: ChainChoice, shape: &ModelShape, limits: &Limits) -> Result<Arc<dyn StepChains>> {
    Ok(match chain {
        ChainChoice::Msa => Arc::new(MsaChains::new(shape, limits, 0)?),
        ChainChoice::M3 => Arc::new(M3Chains::without_weights(shape, limits)?),
    })
}

impl Report {
    fn sharing(&self) -> Sharing {
        match self.chain {
            ChainChoice::Msa => Sharing::Heads,
            ChainChoice::M3 => Sharing::Replicated,
        }
    }

    fn indexer(&self) -> (&'static str, Vec<Refusal>) {
        match gates::indexer(&self.dims, &self.limits, 1 + self.limits.num_speculative_tokens) {
            Indexer::Contract => ("contract", Vec::new()),
            Indexer::General(refused) => ("general", refused),
        }
    }

    fn json(&self) -> Value {
        let (indexer, indexer_refused) = self.indexer();
        let cp_refused = gates::context_parallel(&self.shape, &self.limits, self.sharing());
        let purposes: Vec<Value> =
            self.arena.by_purpose().iter().map(|(purpose, bytes)| json!({"purpose": purpose, "bytes": bytes})).collect();
        json!({
            "model": self.shape,
            "limits": self.limits,
            "rank": self.dims,
            "gates": {
                "indexer": indexer,
                "contract_refused": texts(&indexer_refused),
                "context_parallel": cp_refused.is_empty(),
                "context_parallel_refused": texts(&cp_refused),
            },
            "capture_sizes": self.ladder.sizes(),
            "ladder_advice": self.advice.as_ref().map(Advice::json),
            "cache": {
                "blocks": self.cache_blocks,
                "tokens": self.cache_tokens(),
                "longest_sequences": self.longest_sequences(),
            },
            "device_bytes": device_bytes(&self.arena),
            "memory_bytes": self.memory,
            "total_bytes": self.arena.total_bytes(),
            "purposes": purposes,
            "slabs": self.arena.slabs,
            "buffers": self.arena.buffers,
        })
    }

    fn cache_tokens(&self) -> u64 {
        u64::from(self.cache_blocks) * u64::from(self.shape.block_size)
    }

    fn longest_sequences(&self) -> u32 {
        self.cache_blocks / self.limits.max_model_len.div_ceil(self.shape.block_size)
    }

    fn text(&self, all: bool) -> String {
        let buffers = if all { self.arena.buffers.iter().map(Folded::one).collect() } else { fold(&self.arena) };
        let rows = buffers.iter().map(|folded| {
            vec![
                folded.name.clone(),
                folded.first.spec.dtype.to_string(),
                folded.first.spec.formula.clone(),
                dims(&folded.first.spec.shape),
                kind(folded.first.spec.memory).into(),
                format!("{:#x}", folded.first.offset),
                ByteCount(folded.bytes).to_string(),
                folded.first.spec.reason.clone(),
            ]
        });
        let columns = ["buffer", "type", "shape", ">elements", "memory", ">offset", ">bytes", "why"];
        let advice = self.advice.as_ref().map_or_else(String::new, |advice| format!("\n\n{}", advice.text()));
        format!("{}\n\n{}\n\n{}{advice}", table(&columns, rows), self.purposes(), self.summary())
    }

    fn purposes(&self) -> String {
        let total = self.arena.total_bytes();
        let sums = self.arena.by_purpose();
        let guards = total - sums.iter().map(|(_, bytes)| bytes).sum::<u64>();
        let share = |bytes: u64| format!("{:.1} %", bytes as f64 / total.max(1) as f64 * 100.0);
        let row = |name: &str, bytes| vec![name.to_string(), ByteCount(bytes).to_string(), share(bytes)];
        let mut rows: Vec<_> = sums.iter().map(|&(of, bytes)| row(purpose(of), bytes)).collect();
        rows.push(row("guard bands and alignment", guards));
        rows.push(row("all", total));
        table(&["purpose", ">bytes", ">share"], rows)
    }

    fn summary(&self) -> String {
        let Limits { max_model_len, max_num_seqs, rank, world, kv_dtype, index_dtype, .. } = self.limits;
        let (indexer, indexer_refused) = self.indexer();
        let cp_refused = gates::context_parallel(&self.shape, &self.limits, self.sharing());
        let slabs: Vec<String> =
            self.arena.slabs.iter().map(|slab| format!("{} {}", ByteCount(slab.bytes), kind(slab.memory))).collect();
        let mut lines = vec![
            format!(
                "limits    {max_num_seqs} sequences of up to {max_model_len} tokens, rank {rank} of {world}, kv {kv_dtype}, index keys {index_dtype}"
            ),
            format!("memory    {}", slabs.join(", ")),
            format!(
                "cache     {} blocks of {} tokens: {} tokens, {} longest sequences",
                self.cache_blocks,
                self.shape.block_size,
                self.cache_tokens(),
                self.longest_sequences()
            ),
            format!("ladder    {} sizes: {}", self.ladder.sizes().len(), sizes(self.ladder.sizes())),
            format!("indexer   {indexer}{}", because(&indexer_refused)),
            format!(
                "parallel  {}{}",
                if cp_refused.is_empty() { "context parallel" } else { "one rank scores alone" },
                because(&cp_refused)
            ),
        ];
        if let Some(memory) = self.memory {
            let graphs = self.limits.graph_bytes;
            let left = memory.saturating_sub(device_bytes(&self.arena)).saturating_sub(graphs);
            lines.insert(
                2,
                format!("budget    {}, {} kept for graphs, {} left", ByteCount(memory), ByteCount(graphs), ByteCount(left)),
            );
        }
        lines.join("\n")
    }
}

/// Buffers of several layers that differ in nothing but the layer.
struct Folded<'a> {
    name: String,
    first: &'a PlannedBuffer,
    layers: Vec<u32>,
    bytes: u64,
}

impl<'a> Folded<'a> {
    fn one(buffer: &'a PlannedBuffer) -> Folded<'a> {
        Folded { name: buffer.spec.name.clone(), first: buffer, layers: Vec::new(), bytes: buffer.bytes }
    }
}

/// Folds `layer0.kv_cache`, `layer1.kv_cache`, ... into one entry with the offset of the first and the bytes of all.
fn fold(arena: &ArenaPlan) -> Vec<Folded<'_>> {
    let mut folded: Vec<(&str, Folded)> = Vec::new();
    for buffer in &arena.buffers {
        let Some((layer, rest)) = layer_of(&buffer.spec.name) else {
            folded.push(("", Folded::one(buffer)));
            continue;
        };
        let alike = |(other, entry): &&mut (&str, Folded)| {
            *other == rest && entry.first.spec.shape == buffer.spec.shape && entry.first.spec.dtype == buffer.spec.dtype
        };
        match folded.iter_mut().find(alike) {
            Some((_, entry)) => {
                entry.layers.push(layer);
                entry.bytes += buffer.bytes;
            }
            None => folded.push((rest, Folded { layers: vec![layer], ..Folded::one(buffer) })),
        }
    }
    let mut entries = Vec::with_capacity(folded.len());
    for (rest, mut entry) in folded {
        if entry.layers.len() > 1 {
            entry.name = format!("layer{{{}}}.{rest}", ranges(&entry.layers));
        }
        entries.push(entry);
    }
    entries
}

fn layer_of(name: &str) -> Option<(u32, &str)> {
    let (layer, rest) = name.strip_prefix("layer")?.split_once('.')?;
    Some((layer.parse().ok()?, rest))
}

/// `0-2,5` of ascending numbers.
fn ranges(numbers: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &number in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let show = |&(first, last): &(u32, u32)| if first == last { first.to_string() } else { format!("{first}-{last}") };
    runs.iter().map(show).collect::<Vec<_>>().join(",")
}

fn because(reasons: &[Refusal]) -> String {
    if reasons.is_empty() { String::new() } else { format!(": {}", texts(reasons).join("; ")) }
}

fn texts(reasons: &[Refusal]) -> Vec<String> {
    reasons.iter().map(Refusal::to_string).collect()
}

fn dims(shape: &[u64]) -> String {
    shape.iter().map(u64::to_string).collect::<Vec<_>>().join(" x ")
}

/// A list of sizes; of a long one the ends.
fn sizes(sizes: &[u32]) -> String {
    let show = |sizes: &[u32]| sizes.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    if sizes.len() <= 12 { show(sizes) } else { format!("{}, ..., {}", show(&sizes[..6]), show(&sizes[sizes.len() - 3..])) }
}

fn kind(memory: MemoryKind) -> &'static str {
    match memory {
        MemoryKind::Device => "device",
        MemoryKind::Peer => "peer",
        MemoryKind::Pinned => "pinned",
    }
}

fn purpose(purpose: Purpose) -> &'static str {
    match purpose {
        Purpose::Weights => "weights and tables",
        Purpose::KvCache => "KV cache",
        Purpose::IndexCache => "index-key cache",
        Purpose::Metadata => "step metadata",
        Purpose::Activations => "activations",
        Purpose::Selection => "scores and page tables",
        Purpose::Rings => "rings",
        Purpose::Exchange => "exchange between ranks",
        Purpose::Workspace => "workspaces",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(limits: Limits) -> Report {
        let shape = ModelShape::minimax_m3();
        let (arena, cache_blocks) = plan(ChainChoice::Msa, &shape, &limits).unwrap();
        let (ladder, dims) = (Ladder::new(&limits).unwrap(), AttentionDims::new(&shape, &limits));
        Report { chain: ChainChoice::Msa, shape, limits, dims, arena, cache_blocks, ladder, memory: None, advice: None }
    }

    #[test]
    fn the_table_folds_layers_and_json_holds_every_buffer() {
        let report = report(Limits { max_model_len: 1 << 20, world: 4, ..Limits::default() });
        let text = report.text(false);
        assert!(text.contains("layer{0-56}.kv_cache") && !text.contains("layer7.kv_cache"), "{text}");
        assert!(report.text(true).contains("layer7.kv_cache"));
        let json = report.json();
        assert_eq!(json["buffers"].as_array().unwrap().len(), report.arena.buffers.len());
        for buffer in json["buffers"].as_array().unwrap() {
            for key in ["name", "dtype", "shape", "formula", "memory", "purpose", "reason", "offset", "bytes"] {
                assert!(!buffer[key].is_null(), "{key} of {buffer}");
            }
        }
        let sums: u64 = json["purposes"].as_array().unwrap().iter().map(|sum| sum["bytes"].as_u64().unwrap()).sum();
        // What other ranks own is listed and counted there.
        let own = |buffer: &&Value| {
            !["peer1/", "peer2/", "peer3/"].iter().any(|peer| buffer["name"].as_str().unwrap().starts_with(peer))
        };
        let buffers = json["buffers"].as_array().unwrap().iter().filter(own);
        assert_eq!(buffers.clone().count() + 3, report.arena.buffers.len());
        let buffers: u64 = buffers.map(|buffer| buffer["bytes"].as_u64().unwrap()).sum();
        assert_eq!(sums, buffers);
        assert_eq!(
            (json["gates"]["indexer"].as_str(), json["gates"]["context_parallel"].as_bool()),
            (Some("contract"), Some(true))
        );
    }

    #[test]
    fn ranges_join_runs() {
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8]), "0-2,5,7-8");
        assert_eq!(sizes(&[1, 2, 4]), "1, 2, 4");
    }
}
