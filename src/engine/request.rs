//! Requests as an engine sees them.

use std::sync::mpsc;

use slotmap::new_key_type;

use crate::runtime::{Sampling, SequenceId};

new_key_type! {
    /// A request of an engine; never valid again once its last event was sent.
    pub struct RequestId;
}

/// What a client asks for.
#[derive(Clone, Debug)]
pub struct Request {
    /// Prompt token ids, at least one.
    pub prompt: Vec<i32>,
    /// Tokens to generate at most.
    pub max_new: u32,
    /// How to sample.
    pub sampling: Sampling,
    /// Tokens that end the request; the stop token itself is the last one sent.
    pub stop: Vec<i32>,
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// `max_new` tokens were generated.
    Length,
    /// A stop token came.
    Stop,
    /// The sequence reached `max_model_len`.
    ModelLength,
    /// It was cancelled, or its receiver was dropped.
    Cancelled,
}

impl Finish {
    /// The name it has in reports.
    pub fn name(self) -> &'static str {
        match self {
            Finish::Length => "length",
            Finish::Stop => "stop",
            Finish::ModelLength => "model_length",
            Finish::Cancelled => "cancelled",
        }
    }
}

/// What a request's channel carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The next token.
    Token(i32),
    /// The end; nothing follows.
    Finished(Finish),
}

/// A request inside the engine: its tokens so far (prompt, then generated), and its sequence while it is admitted.
#[derive(Debug)]
pub(super) struct Live {
    pub request: Request,
    pub events: mpsc::Sender<Event>,
    /// Prompt and generated tokens.
    pub tokens: Vec<i32>,
    /// Tokens whose keys and values are cached.
    pub cached: usize,
    pub sequence: Option<SequenceId>,
    pub blocks: usize,
    pub cancelled: bool,
    /// Order of admission; the youngest is preempted first.
    pub admitted: u64,
}

impl Live {
    pub fn generated(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    /// Tokens to prefill before the next one can be sampled; 1 means a decode step.
    pub fn uncached(&self) -> usize {
        self.tokens.len() - self.cached
    }
}
