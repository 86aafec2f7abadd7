//! `capstan generate`: prompts in, tokens out.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use clap::{ArgGroup, Args};
use serde_json::{Value, json};

use super::progress::Bar;
use super::prompts::{Text, needed, read_ids};
use super::{Shared, print, ranks, write};
use crate::chain::StepChains;
use crate::config::{LimitsInput, ModelShape};
use crate::engine::{Engine, EngineLimits, Request};
use crate::error::{Error, Result};
use crate::measure::serve::Spread;
use crate::measure::{Client, Outcome};
use crate::model::{Checkpoint, M3Chains};
use crate::runtime::{Executor, Sampling};

/// Flags of `capstan generate`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("prompts").required(true))]
pub(super) struct GenerateArgs {
    #[command(flatten)]
    shared: Shared,
    /// Prompts as text; the model needs a tokenizer.json
    #[arg(long, value_name = "TEXT", num_args = 1.., group = "prompts")]
    prompt: Vec<String>,
    /// Prompts as files of token ids, one prompt a file
    #[arg(long, value_name = "FILE", num_args = 1.., group = "prompts")]
    prompt_ids: Vec<PathBuf>,
    /// Tokens to generate at most
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_new: u32,
    /// Softmax temperature; 0 takes the largest logit
    #[arg(long, default_value_t = 0.0, value_name = "T")]
    temperature: f32,
    /// Sample from this many of the largest logits; 0 for all
    #[arg(long, default_value_t = 0, value_name = "K")]
    top_k: u32,
    /// Sample from the fewest tokens whose probabilities reach this sum
    #[arg(long, default_value_t = 1.0, value_name = "P")]
    top_p: f32,
    /// Sample from tokens with at least this share of the largest probability
    #[arg(long, default_value_t = 0.0, value_name = "P")]
    min_p: f32,
    /// Token that ends a request, beside the model's own; may be repeated
    #[arg(long, value_name = "ID")]
    stop: Vec<i32>,
    /// Do not end at the model's own end token
    #[arg(long)]
    ignore_eos: bool,
}

/// A prompt that was taken, or why not.
type Entry = Result<Outcome>;

/// Exit code 1 if one of several prompts was refused; the others are served.
pub(super) fn run(args: &GenerateArgs) -> Result<ExitCode> {
    let shared = &args.shared;
    let dir = shared.model()?;
    let text = Text::read(dir)?;
    let prompts = args.read_prompts(text.as_ref())?;
    let device = shared.open_device_of_rank()?;
    if !device.info().executes {
        return Err(
            Error::unavailable("the null device records and runs nothing: no token would come out").help("use --device cpu")
        );
    }
    let checkpoint = Arc::new(Checkpoint::open(dir)?);
    let shape = checkpoint.shape().clone();
    let requests = args.requests(&prompts, &shape)?;
    let (limits, group) = ranks::joined(shared.limits_or(args.defaults(&prompts, &shape)?, &shape)?)?;
    // Every rank generates the same; rank 0 says so.
    let speaks = group.is_none() || limits.rank == 0;
    let nodes = |limits: &_| -> Result<Arc<dyn StepChains>> { Ok(Arc::new(M3Chains::without_weights(&shape, limits)?)) };
    let limits = shared.keep_for_graphs(limits, &shape, device.info().platform, nodes)?;
    let chains: Arc<dyn StepChains> = Arc::new(M3Chains::new(checkpoint, &limits)?);
    let engine_limits = EngineLimits::of(&*chains);
    let executor = match group {
        Some(group) => Executor::join(&device, chains, group)?,
        None => Executor::new(&device, chains)?,
    };
    let mut engine = Engine::new(executor, engine_limits);
    // What cannot be served is known before anything is captured.
    let alone = requests.len() == 1;
    let mut clients = Vec::with_capacity(requests.len());
    for (at, request) in requests.into_iter().enumerate() {
        let prompt_len = request.prompt.len() as u32;
        let submitted = engine.submit(request).map(|(_, events)| Client::new(at as u32, prompt_len, events));
        clients.push(submitted.map_err(|error| error.within(&args.name(at))));
    }
    if alone && let Err(error) = &clients[0] {
        return Err(error.clone());
    }
    let mut bar = Bar::new();
    if clients.iter().any(Result::is_ok) {
        engine.steps_mut().capture(|at| bar.serving(crate::measure::serve::Progress::Capture(at)))?;
    }
    drop(bar);
    let stream = alone && !shared.json && speaks;
    let (entries, seconds) = serve(&mut engine, clients, stream, text.as_ref())?;
    match shared.json {
        _ if !speaks => {}
        true => print(&format!("{:#}", args.report(&entries, text.as_ref(), seconds)?))?,
        false if !stream => args.print_each(&entries, text.as_ref())?,
        false => {}
    }
    let refused: Vec<&Error> = entries.iter().filter_map(|entry| entry.as_ref().err()).collect();
    for error in &refused {
        eprintln!("error: {error}");
    }
    Ok(if refused.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Steps until every request has ended. With `stream` the only one's tokens go to stdout as they come.
fn serve(
    engine: &mut Engine<Executor>,
    clients: Vec<Result<Client>>,
    stream: bool,
    text: Option<&Text>,
) -> Result<(Vec<Entry>, f64)> {
    let mut decode = text.map(Text::decoder);
    let mut clients: Vec<_> = clients.into_iter().map(|client| client.map(|client| (client, None))).collect();
    let (mut shown, mut bar, all) = (0, Bar::new(), clients.len() as u64);
    let started = Instant::now();
    for (client, _) in clients.iter_mut().flatten() {
        client.restart();
    }
    while !engine.is_idle() {
        engine.step()?;
        let mut ended = 0;
        for (client, outcome) in clients.iter_mut().flatten() {
            let done = client.receive();
            *outcome = outcome.take().or(done);
            ended += u64::from(outcome.is_some());
            if !stream {
                continue;
            }
            let tokens = outcome.as_ref().map_or(client.tokens(), |outcome| &outcome.tokens);
            for &id in &tokens[shown..] {
                let piece = match &mut decode {
                    Some(decode) => decode(id)?,
                    None if shown == 0 => id.to_string(),
                    None => format!(" {id}"),
                };
                shown += 1;
                if !write(&piece)? {
                    // Nobody reads any more.
                    return Ok((Vec::new(), started.elapsed().as_secs_f64()));
                }
            }
        }
        if !stream {
            bar.show("generating", ended, all, "requests".into());
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    drop(bar);
    if stream {
        print("")?;
    }
    let ended = |outcome: Option<Outcome>| outcome.expect("invariant: an idle engine has ended every request");
    Ok((clients.into_iter().map(|entry| entry.map(|(_, outcome)| ended(outcome))).collect(), seconds))
}

impl GenerateArgs {
    /// How a prompt is named in messages.
    fn name(&self, at: usize) -> String {
        match self.prompt_ids.get(at) {
            Some(file) => format!("prompt {} ({})", at + 1, file.display()),
            None => format!("prompt {}", at + 1),
        }
    }

    fn read_prompts(&self, text: Option<&Text>) -> Result<Vec<Vec<i32>>> {
        if !self.prompt_ids.is_empty() {
            return self.prompt_ids.iter().map(|file| read_ids(file)).collect();
        }
        let text = needed(text, self.shared.model()?)?;
        self.prompt.iter().map(|prompt| text.encode(prompt)).collect()
    }

    /// Each samples with the same seed: what a prompt gives does not depend on the prompts beside it.
    fn requests(&self, prompts: &[Vec<i32>], shape: &ModelShape) -> Result<Vec<Request>> {
        let (temperature, top_k, top_p, min_p) = (self.temperature, self.top_k, self.top_p, self.min_p);
        let sampling = Sampling { temperature, top_k, top_p, min_p, seed: self.shared.seed };
        sampling.validate().map_err(|error| {
            Error::config(error.message()).help("--temperature 0 or more, --top-p above 0, --min-p 0 or more")
        })?;
        if let Some(id) = self.stop.iter().find(|&&id| id < 0 || id as u32 >= shape.vocab) {
            return Err(Error::config(format!("--stop {id}: the model's vocabulary is {} tokens", shape.vocab))
                .help("pass a token id below that"));
        }
        let mut stop = self.stop.clone();
        if !self.ignore_eos {
            stop.extend(shape.eos_tokens.iter().map(|&id| id as i32));
        }
        let request = |prompt: &Vec<i32>| Request { prompt: prompt.clone(), max_new: self.max_new, sampling, stop: stop.clone() };
        Ok(prompts.iter().map(request).collect())
    }

    /// Room for these prompts and no more: what is not asked for is not planned.
    fn defaults(&self, prompts: &[Vec<i32>], shape: &ModelShape) -> Result<LimitsInput> {
        let given = self.shared.input()?;
        let grown = |prompt: &Vec<i32>| (prompt.len() as u32).saturating_add(self.max_new);
        let longest = prompts.iter().map(grown).max().unwrap_or(1);
        let max_model_len = given.max_model_len.unwrap_or(longest.min(shape.max_position_embeddings));
        let max_num_seqs = prompts.len().min(256) as u32;
        let rows =
            given.max_num_seqs.unwrap_or(max_num_seqs).saturating_mul(1 + given.num_speculative_tokens.unwrap_or(0).min(15));
        // A block more for each is what admission keeps free.
        let blocks: u32 = prompts.iter().map(|prompt| grown(prompt).min(max_model_len).div_ceil(shape.block_size) + 1).sum();
        let most = max_num_seqs.saturating_mul(max_model_len.div_ceil(shape.block_size) + 1);
        Ok(LimitsInput {
            max_model_len: Some(max_model_len),
            max_num_seqs: Some(max_num_seqs),
            max_num_batched_tokens: Some(rows.max(512)),
            cache_blocks: given.memory.is_none().then_some(blocks.min(most)),
            ..LimitsInput::default()
        })
    }

    fn report(&self, entries: &[Entry], text: Option<&Text>, seconds: f64) -> Result<Value> {
        let mut requests = Vec::with_capacity(entries.len());
        for (at, entry) in entries.iter().enumerate() {
            requests.push(match entry {
                Ok(outcome) => {
                    let text = text.map(|text| text.decode(&outcome.tokens)).transpose()?;
                    json!({
                        "prompt": at,
                        "prompt_tokens": outcome.prompt_len,
                        "ids": outcome.tokens,
                        "text": text,
                        "stop_reason": outcome.finish,
                        "first_token_seconds": outcome.first_token_seconds,
                        "inter_token_seconds": Spread::of(&mut outcome.inter_token_seconds.clone()),
                    })
                }
                Err(error) => json!({ "prompt": at, "error": error.to_string() }),
            });
        }
        let tokens: usize = entries.iter().flatten().map(|outcome| outcome.tokens.len()).sum();
        Ok(json!({ "requests": requests, "tokens": tokens, "seconds": seconds, "tokens_per_second": tokens as f64 / seconds }))
    }

    fn print_each(&self, entries: &[Entry], text: Option<&Text>) -> Result<()> {
        for (at, entry) in entries.iter().enumerate() {
            let Ok(outcome) = entry else { continue };
            let ids = || outcome.tokens.iter().map(i32::to_string).collect::<Vec<_>>().join(" ");
            let body = text.map_or_else(|| Ok(ids()), |text| text.decode(&outcome.tokens))?;
            print(&format!("{} ({}): {body}", self.name(at), outcome.finish.name()))?;
        }
        Ok(())
    }
}
