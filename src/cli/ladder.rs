//! `capstan plan --batch-histogram`: capture sizes for recorded traffic, beside the policy's.

use std::path::Path;

use serde_json::{Value, json};

use super::table::table;
use crate::capture::GraphCost;
use crate::capture::advice::{BatchHistogram, LadderCost, Terms, advise, price_ladder};
use crate::chain::{GraphKey, StepChains};
use crate::config::{ByteCount, CaptureSizes, Limits};
use crate::error::{Error, Result};
use crate::hal::Platform;

/// Ladders priced for one histogram.
pub(super) struct Advice {
    histogram: BatchHistogram,
    terms: Terms,
    platform: Platform,
    /// The policy's default; the sizes that were asked for, where they are others; the best.
    ladders: Vec<(&'static str, LadderCost)>,
}

impl Advice {
    /// Prices the ladders of `chains` for the histogram in `file`, graphs at what they cost on `platform`.
    pub fn new(file: &Path, chains: &dyn StepChains, platform: Platform, worth: Option<ByteCount>) -> Result<Advice> {
        let text = std::fs::read_to_string(file).map_err(|error| {
            Error::input(format!("{}: {error}", file.display())).help("pass a file of `rows steps` lines, or of JSON")
        })?;
        let histogram = BatchHistogram::parse(&text).map_err(|error| {
            let help = error.help_line().unwrap_or_default().to_string();
            Error::input(format!("{}: {}", file.display(), error.message())).help(help)
        })?;
        let limits = chains.limits();
        let largest = limits.max_num_seqs * (1 + limits.num_speculative_tokens);
        let terms = Terms {
            cost: GraphCost::of(platform),
            nodes: chains.decode(&GraphKey::decode(limits, largest)).ops.len() as u64,
            percent_worth_bytes: worth.map_or(Terms::PERCENT_WORTH_BYTES, |worth| worth.0),
        };
        let default = Limits { capture: CaptureSizes::Default, ..limits.clone() };
        let mut ladders = vec![("default", price_ladder(&histogram, &default, &terms)?)];
        if limits.capture != CaptureSizes::Default {
            ladders.push(("asked for", price_ladder(&histogram, limits, &terms)?));
        }
        ladders.push(("best", advise(&histogram, limits, &terms)?));
        Ok(Advice { histogram, terms, platform, ladders })
    }

    fn padded_share(&self, cost: &LadderCost) -> f64 {
        cost.pad_rows as f64 / (cost.pad_rows + self.histogram.live_rows()) as f64
    }

    fn best(&self) -> &LadderCost {
        &self.ladders.last().expect("invariant: the best ladder is always there").1
    }

    fn gain(&self) -> (i128, i128) {
        let (default, best) = (&self.ladders[0].1, self.best());
        let gain = |default: u64, best: u64| i128::from(default) - i128::from(best);
        (gain(default.pad_rows, best.pad_rows), gain(default.graph_bytes, best.graph_bytes))
    }

    pub fn json(&self) -> Value {
        let ladders = self.ladders.iter().map(|(name, cost)| {
            let mut value = json!(cost);
            value["name"] = json!(name);
            value["padded_share"] = json!(self.padded_share(cost));
            value
        });
        let (pad_rows, graph_bytes) = self.gain();
        json!({
            "platform": self.platform,
            "steps": self.histogram.steps(),
            "live_rows": self.histogram.live_rows(),
            "percent_worth_bytes": self.terms.percent_worth_bytes,
            "ladders": ladders.collect::<Vec<_>>(),
            // Signed, and within 64 bits wherever the figures above are.
            "gain": { "pad_rows": pad_rows as i64, "graph_bytes": graph_bytes as i64 },
        })
    }

    pub fn text(&self) -> String {
        let rows = self.ladders.iter().map(|(name, cost)| {
            vec![
                (*name).into(),
                cost.sizes.len().to_string(),
                cost.pad_rows.to_string(),
                format!("{:.2} %", self.padded_share(cost) * 100.0),
                cost.eager_steps.to_string(),
                ByteCount(cost.graph_bytes).to_string(),
            ]
        });
        let columns = ["ladder", ">graphs", ">padded rows", ">of all rows", ">eager steps", ">graph memory"];
        let sizes: Vec<String> = self.best().sizes.iter().map(u32::to_string).collect();
        let (pad_rows, graph_bytes) = self.gain();
        let memory = match ByteCount(u64::try_from(graph_bytes.unsigned_abs()).unwrap_or(u64::MAX)) {
            ByteCount(0) => "the same".to_owned(),
            bytes if graph_bytes < 0 => format!("{bytes} more"),
            bytes => format!("{bytes} less"),
        };
        format!(
            "Recorded traffic: {} steps, {} rows; graphs at what they take on {}; one percent of padded rows is worth {}.\n\n{}\n\n\
             The best ladder pads {pad_rows} rows fewer than the default with {memory} graph memory:\n--capture-sizes {}",
            self.histogram.steps(),
            self.histogram.live_rows(),
            self.platform,
            ByteCount(self.terms.percent_worth_bytes),
            table(&columns, rows),
            sizes.join(",")
        )
    }
}
