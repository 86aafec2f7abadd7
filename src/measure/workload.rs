//! A serving-like workload: seeded arrivals of requests of mixed lengths, run through an engine.

use std::collections::HashMap;
use std::time::Instant;

use serde::Serialize;

use super::client::{Client, Outcome};
use crate::engine::{Engine, Request, RequestId, Steps};
use crate::error::Result;
use crate::random::Random;
use crate::runtime::Sampling;

/// What arrives.
#[derive(Clone, Debug, Serialize)]
pub struct Workload {
    /// Seed of everything random.
    pub seed: u64,
    /// Requests in all.
    pub requests: u32,
    /// Requests that arrive before a step, on average.
    pub arrivals_a_step: f64,
    /// Prompt lengths, inclusive; drawn log-uniformly, so that short ones are common and long ones occur.
    pub prompt_len: (u32, u32),
    /// Tokens to generate, inclusive.
    pub max_new: (u32, u32),
    /// Share of requests that sample with a temperature instead of greedily.
    pub sampled: f64,
}

/// A finished run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Served {
    /// Every request, in order of arrival.
    pub outcomes: Vec<Outcome>,
    /// Engine steps.
    pub steps: u64,
    /// Steps that decoded.
    pub decode_steps: u64,
    /// Prompt tokens prefilled.
    pub prefilled: u64,
    /// Preemptions.
    pub preempted: u64,
    /// Wall time, seconds.
    pub seconds: f64,
}

impl Served {
    /// Generated tokens.
    pub fn tokens(&self) -> u64 {
        self.outcomes.iter().map(|outcome| outcome.tokens.len() as u64).sum()
    }
}

impl Workload {
    /// The requests, in order of arrival. `max_model_len` bounds prompt plus generated tokens.
    pub fn requests(&self, vocab: u32, max_model_len: u32) -> Vec<Request> {
        let mut random = Random::new(self.seed);
        (0..self.requests)
            .map(|_| {
                let (low, high) = (f64::from(self.prompt_len.0).ln(), f64::from(self.prompt_len.1).ln());
                let len = (low + (high - low) * random.unit()).exp().round() as u32;
                let len = len.clamp(1, max_model_len.saturating_sub(1).max(1));
                let max_new = random.range(self.max_new.0, self.max_new.1).min(max_model_len - len).max(1);
                let sampling = match random.unit() < self.sampled {
                    true => Sampling { temperature: 0.8, top_p: 0.95, seed: random.next_u64(), ..Sampling::GREEDY },
                    false => Sampling::GREEDY,
                };
                let prompt = (0..len).map(|_| random.range(0, vocab - 1) as i32).collect();
                Request { prompt, max_new, sampling, stop: Vec::new() }
            })
            .collect()
    }

    /// Serves everything; `progress` gets (finished requests, all requests) after each step.
    pub fn serve<S: Steps>(
        &self,
        engine: &mut Engine<S>,
        requests: Vec<Request>,
        mut progress: impl FnMut(u32, u32),
    ) -> Result<Served> {
        let mut arrivals = Random::new(self.seed ^ 0xa11);
        let mut served = Served::default();
        let (all, started) = (requests.len() as u32, Instant::now());
        let mut requests = requests.into_iter().enumerate();
        let mut open: HashMap<RequestId, Client> = HashMap::new();
        let mut due = 0.0;
        while served.outcomes.len() < all as usize {
            due += self.arrivals_a_step * 2.0 * arrivals.unit();
            while due >= 1.0 || engine.is_idle() {
                due -= 1.0;
                let Some((index, request)) = requests.next() else { break };
                let prompt_len = request.prompt.len() as u32;
                let (id, events) = engine.submit(request)?;
                open.insert(id, Client::new(index as u32, prompt_len, events));
            }
            let summary = engine.step()?;
            served.steps += 1;
            served.decode_steps += u64::from(summary.decoded > 0);
            served.prefilled += summary.prefilled as u64;
            served.preempted += summary.preempted as u64;
            if summary.tokens > 0 {
                open.retain(|_, request| match request.receive() {
                    None => true,
                    Some(outcome) => {
                        served.outcomes.push(outcome);
                        false
                    }
                });
                progress(served.outcomes.len() as u32, all);
            }
        }
        served.outcomes.sort_by_key(|outcome| outcome.index);
        served.seconds = started.elapsed().as_secs_f64();
        Ok(served)
    }
}

/// The value at share `q` (0 to 1) of `values`; 0 if there are none. Sorts them.
pub fn quantile(values: &mut [f64], q: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        len => values[((len - 1) as f64 * q).round() as usize],
    }
}
