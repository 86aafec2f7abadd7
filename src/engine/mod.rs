//! A small scheduler on top of the executor: what a server embeds if it has none of its own.
//!
//! Admission by free blocks, continuous batching (a step takes what is ready), chunked prefill, preemption by recompute when
//! blocks run out, stop tokens, cancellation, one channel a request. It never touches the device: everything goes through
//! [`Steps`], which the [`Executor`](crate::runtime::Executor) implements.

mod blocks;
mod request;
mod steps;

use std::collections::VecDeque;
use std::sync::mpsc;

use slotmap::SlotMap;

pub use blocks::BlockPool;
pub use request::{Event, Finish, Request, RequestId};
pub use steps::Steps;

use request::Live;

use crate::chain::StepChains;
use crate::error::{Error, Result};
use crate::runtime::{BlockId, SequenceStep};

/// Limits an engine schedules by.
#[derive(Clone, Copy, Debug)]
pub struct EngineLimits {
    /// Longest sequence, tokens.
    pub max_model_len: u32,
    /// Sequences admitted at once.
    pub max_num_seqs: u32,
    /// Prefill tokens of one step.
    pub max_num_batched_tokens: u32,
    /// Tokens of a block.
    pub block_size: u32,
    /// Cache blocks.
    pub cache_blocks: u32,
    /// Token ids are below this.
    pub vocab: u32,
}

impl EngineLimits {
    /// The limits an executor of `chains` has.
    pub fn of(chains: &dyn StepChains) -> EngineLimits {
        let (limits, layout) = (chains.limits(), chains.step_layout());
        EngineLimits {
            max_model_len: limits.max_model_len,
            max_num_seqs: limits.max_num_seqs,
            max_num_batched_tokens: limits.max_num_batched_tokens,
            block_size: layout.block_size,
            cache_blocks: layout.cache_blocks,
            vocab: chains.vocab(),
        }
    }
}

/// What one [`Engine::step`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepSummary {
    /// Rows decoded.
    pub decoded: usize,
    /// Prompt tokens prefilled.
    pub prefilled: usize,
    /// Tokens sent to clients.
    pub tokens: usize,
    /// Requests preempted for lack of blocks.
    pub preempted: usize,
    /// Requests that ended.
    pub finished: usize,
}

/// The engine. One thread drives it: submit and cancel between steps, step until idle.
#[derive(Debug)]
pub struct Engine<S> {
    steps: S,
    limits: EngineLimits,
    pool: BlockPool,
    requests: SlotMap<RequestId, Live>,
    waiting: VecDeque<RequestId>,
    running: Vec<RequestId>,
    admissions: u64,
    grant: Vec<BlockId>,
}

impl<S: Steps> Engine<S> {
    /// An engine over `steps`.
    pub fn new(steps: S, limits: EngineLimits) -> Engine<S> {
        Engine {
            steps,
            limits,
            pool: BlockPool::new(limits.cache_blocks),
            requests: SlotMap::with_key(),
            waiting: VecDeque::new(),
            running: Vec::with_capacity(limits.max_num_seqs as usize),
            admissions: 0,
            grant: Vec::new(),
        }
    }

    /// Accepts a request. Errors name what is wrong with it; the others are served on.
    pub fn submit(&mut self, request: Request) -> Result<(RequestId, mpsc::Receiver<Event>)> {
        let limits = &self.limits;
        if request.prompt.is_empty() || request.max_new == 0 {
            return Err(Error::batch("a request needs a prompt and at least one token to generate")
                .help("pass at least one prompt token, and max_new of at least 1"));
        }
        if request.prompt.len() >= limits.max_model_len as usize {
            return Err(Error::batch(format!(
                "the prompt has {} tokens, max_model_len is {}",
                request.prompt.len(),
                limits.max_model_len
            ))
            .help("shorten the prompt or raise max_model_len"));
        }
        if let Some(token) = request.prompt.iter().find(|&&token| token < 0 || token as u32 >= limits.vocab) {
            return Err(Error::batch(format!("prompt token {token} is not in the vocabulary of {}", limits.vocab))
                .help("tokenize with this model's tokenizer"));
        }
        request.sampling.validate()?;
        let longest = (request.prompt.len() as u64 + u64::from(request.max_new)).min(u64::from(limits.max_model_len)) - 1;
        let needed = longest.div_ceil(u64::from(limits.block_size));
        if needed > self.pool.total() as u64 {
            return Err(Error::batch(format!(
                "the request may grow to {needed} blocks, the whole cache has {}",
                self.pool.total()
            ))
            .help("lower max_new, shorten the prompt, or plan more cache blocks"));
        }
        let (events, receiver) = mpsc::channel();
        let tokens = request.prompt.clone();
        let live = Live { request, events, tokens, cached: 0, sequence: None, blocks: 0, cancelled: false, admitted: 0 };
        let id = self.requests.insert(live);
        self.waiting.push_back(id);
        Ok((id, receiver))
    }

    /// Submits a request and steps until it has ended, with whatever else is live. Gives its tokens and why it ended.
    pub fn run(&mut self, request: Request) -> Result<(Vec<i32>, Finish)> {
        let (_, events) = self.submit(request)?;
        let mut tokens = Vec::new();
        loop {
            for event in events.try_iter() {
                match event {
                    Event::Token(token) => tokens.push(token),
                    Event::Finished(finish) => return Ok((tokens, finish)),
                }
            }
            self.step()?;
        }
    }

    /// Ends a request at the next step. Unknown ids are ignored: it has ended already.
    pub fn cancel(&mut self, id: RequestId) {
        if let Some(live) = self.requests.get_mut(id) {
            live.cancelled = true;
        }
    }

    /// True when no request is left.
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// Requests waiting and running.
    pub fn load(&self) -> (usize, usize) {
        (self.waiting.len(), self.running.len())
    }

    /// What it steps.
    pub fn steps(&self) -> &S {
        &self.steps
    }

    /// What it steps, to change.
    pub fn steps_mut(&mut self) -> &mut S {
        &mut self.steps
    }

    /// Runs one step: drops what was cancelled, admits what fits, decodes every sequence that is ready, prefills the others up
    /// to the token budget, and sends the tokens out.
    pub fn step(&mut self) -> Result<StepSummary> {
        let mut summary = StepSummary::default();
        self.drop_cancelled(&mut summary)?;
        self.admit()?;
        let decodes = self.ready_to_decode(&mut summary)?;
        let prefills = self.plan_prefill(&decodes);
        let mut sampled = Vec::with_capacity(decodes.len() + prefills.len());
        if !decodes.is_empty() {
            let steps: Vec<_> = decodes.iter().map(|&id| sequence_step(&self.requests, id, 1)).collect();
            let tokens = self.steps.decode(&steps)?;
            sampled.extend(decodes.iter().copied().zip(tokens.iter().copied()));
        }
        if !prefills.is_empty() {
            let steps: Vec<_> = prefills.iter().map(|&(id, count)| sequence_step(&self.requests, id, count)).collect();
            let tokens = self.steps.prefill(&steps)?;
            sampled.extend(prefills.iter().map(|&(id, _)| id).zip(tokens.iter().copied()));
        }
        summary.decoded = decodes.len();
        summary.prefilled = prefills.iter().map(|&(_, count)| count).sum();
        for &id in &decodes {
            self.requests[id].cached += 1;
        }
        for &(id, count) in &prefills {
            self.requests[id].cached += count;
        }
        for (id, token) in sampled {
            self.deliver(id, token, &mut summary)?;
        }
        Ok(summary)
    }
}

impl<S: Steps> Engine<S> {
    fn drop_cancelled(&mut self, summary: &mut StepSummary) -> Result<()> {
        let gone: Vec<RequestId> = self.requests.iter().filter(|(_, live)| live.cancelled).map(|(id, _)| id).collect();
        for id in gone {
            self.finish(id, Finish::Cancelled)?;
            summary.finished += 1;
        }
        Ok(())
    }

    /// Admits waiting requests in order while there are sequences and blocks for all their tokens and one more.
    fn admit(&mut self) -> Result<()> {
        while let Some(&id) = self.waiting.front() {
            let needed = (self.requests[id].tokens.len()).div_ceil(self.limits.block_size as usize);
            // A block for each running sequence's growth stays free, so that an admission is not undone at once.
            let spare = self.running.len().min(self.pool.total() - needed);
            if self.running.len() >= self.limits.max_num_seqs as usize || self.pool.free() < needed + spare {
                return Ok(());
            }
            self.waiting.pop_front();
            let sequence = self.steps.open()?;
            let live = &mut self.requests[id];
            live.sequence = Some(sequence);
            live.cached = 0;
            live.blocks = 0;
            live.admitted = self.admissions;
            self.admissions += 1;
            self.running.push(id);
            let granted = self.grow(id, needed)?;
            assert!(granted, "invariant: admission counted the free blocks");
        }
        Ok(())
    }

    /// The running requests with one token left to cache, each with a block for it; preempts the youngest where blocks run out.
    fn ready_to_decode(&mut self, summary: &mut StepSummary) -> Result<Vec<RequestId>> {
        let mut decodes: Vec<RequestId> = Vec::with_capacity(self.running.len());
        let mut at = 0;
        while at < self.running.len() {
            let id = self.running[at];
            let live = &self.requests[id];
            if live.uncached() == 1 {
                let needed = live.tokens.len().div_ceil(self.limits.block_size as usize);
                if !self.grow(id, needed)? {
                    let youngest = self.youngest();
                    self.preempt(youngest)?;
                    summary.preempted += 1;
                    decodes.retain(|&other| other != youngest);
                    at = self.running.iter().position(|&other| other == id).unwrap_or(at);
                    continue;
                }
                decodes.push(id);
            }
            at += 1;
        }
        Ok(decodes)
    }

    /// Prompt tokens to prefill this step, oldest admission first, up to the token budget.
    fn plan_prefill(&self, decodes: &[RequestId]) -> Vec<(RequestId, usize)> {
        let mut budget = self.limits.max_num_batched_tokens as usize;
        let mut prefills = Vec::new();
        for &id in self.running.iter().filter(|id| !decodes.contains(id)) {
            let count = self.requests[id].uncached().min(budget);
            if count > 0 {
                prefills.push((id, count));
                budget -= count;
            }
        }
        prefills
    }

    /// Takes a sampled token, if the request's tokens are all cached: a chunk in the middle of a prompt samples nothing of use.
    fn deliver(&mut self, id: RequestId, token: i32, summary: &mut StepSummary) -> Result<()> {
        let live = &mut self.requests[id];
        if live.uncached() > 0 {
            return Ok(());
        }
        live.tokens.push(token);
        summary.tokens += 1;
        let received = live.events.send(Event::Token(token)).is_ok();
        let finish = if !received {
            Finish::Cancelled
        } else if live.request.stop.contains(&token) {
            Finish::Stop
        } else if live.generated() >= live.request.max_new as usize {
            Finish::Length
        } else if live.tokens.len() >= self.limits.max_model_len as usize {
            Finish::ModelLength
        } else {
            return Ok(());
        };
        summary.finished += 1;
        self.finish(id, finish)
    }

    /// Grows a request's blocks to `needed`; false, and nothing changed, if there are not enough.
    fn grow(&mut self, id: RequestId, needed: usize) -> Result<bool> {
        let live = &mut self.requests[id];
        if needed <= live.blocks {
            return Ok(true);
        }
        self.grant.clear();
        if !self.pool.take(needed - live.blocks, &mut self.grant) {
            return Ok(false);
        }
        let sequence = live.sequence.expect("invariant: running requests have a sequence");
        live.blocks = needed;
        self.steps.grant(sequence, &self.grant)?;
        Ok(true)
    }

    fn youngest(&self) -> RequestId {
        *self
            .running
            .iter()
            .max_by_key(|&&id| self.requests[id].admitted)
            .expect("invariant: a request that needs a block is running")
    }

    /// Takes a request's blocks away; it waits at the front and is computed again from all its tokens.
    fn preempt(&mut self, id: RequestId) -> Result<()> {
        tracing::debug!(?id, "preempted: out of blocks");
        self.close(id)?;
        self.requests[id].cached = 0;
        self.waiting.push_front(id);
        Ok(())
    }

    fn finish(&mut self, id: RequestId, why: Finish) -> Result<()> {
        self.close(id)?;
        self.waiting.retain(|&other| other != id);
        if let Some(live) = self.requests.remove(id) {
            // A receiver that is gone does not want to know.
            let _ = live.events.send(Event::Finished(why));
        }
        Ok(())
    }

    fn close(&mut self, id: RequestId) -> Result<()> {
        let live = &mut self.requests[id];
        live.blocks = 0;
        if let Some(sequence) = live.sequence.take() {
            self.running.retain(|&other| other != id);
            let pool = &mut self.pool;
            self.steps.close(sequence, &mut |block| pool.give(block))?;
        }
        Ok(())
    }
}

fn sequence_step(requests: &SlotMap<RequestId, Live>, id: RequestId, count: usize) -> SequenceStep<'_> {
    let live = &requests[id];
    SequenceStep {
        sequence: live.sequence.expect("invariant: running requests have a sequence"),
        tokens: &live.tokens[live.cached..live.cached + count],
        kv_len: (live.cached + count) as u32,
        sampling: live.request.sampling,
    }
}
