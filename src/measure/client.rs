//! The receiving end of a request, with a clock.

use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::engine::{Event, Finish};

/// One request's outcome.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// Order of arrival.
    pub index: u32,
    /// Prompt tokens.
    pub prompt_len: u32,
    /// Generated tokens.
    pub tokens: Vec<i32>,
    /// Why it ended.
    pub finish: Finish,
    /// From arrival to the first token, seconds.
    pub first_token_seconds: f64,
    /// Between tokens, seconds each.
    pub inter_token_seconds: Vec<f64>,
}

/// Takes a request's events and notes when each came.
#[derive(Debug)]
pub struct Client {
    index: u32,
    prompt_len: u32,
    arrived: Instant,
    last: Instant,
    events: Receiver<Event>,
    tokens: Vec<i32>,
    first: Option<Duration>,
    gaps: Vec<f64>,
}

impl Client {
    /// Of a request submitted just now.
    pub fn new(index: u32, prompt_len: u32, events: Receiver<Event>) -> Client {
        let now = Instant::now();
        Client { index, prompt_len, arrived: now, last: now, events, tokens: Vec::new(), first: None, gaps: Vec::new() }
    }

    /// Tokens received so far; none once the outcome was given.
    pub fn tokens(&self) -> &[i32] {
        &self.tokens
    }

    /// Starts the clock again, for a request that was submitted before the work could begin.
    pub fn restart(&mut self) {
        let now = Instant::now();
        (self.arrived, self.last) = (now, now);
    }

    /// Takes what has come; the outcome, once, when the request has ended.
    pub fn receive(&mut self) -> Option<Outcome> {
        while let Ok(event) = self.events.try_recv() {
            match event {
                Event::Token(token) => {
                    let now = Instant::now();
                    match self.first {
                        None => self.first = Some(now - self.arrived),
                        Some(_) => self.gaps.push((now - self.last).as_secs_f64()),
                    }
                    self.last = now;
                    self.tokens.push(token);
                }
                Event::Finished(finish) => {
                    return Some(Outcome {
                        index: self.index,
                        prompt_len: self.prompt_len,
                        tokens: std::mem::take(&mut self.tokens),
                        finish,
                        first_token_seconds: self.first.unwrap_or_default().as_secs_f64(),
                        inter_token_seconds: std::mem::take(&mut self.gaps),
                    });
                }
            }
        }
        None
    }
}
