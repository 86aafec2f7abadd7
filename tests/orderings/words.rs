//! Peer buffers of `loom`'s atomics, and ranks as its threads.

use std::sync::Arc;

use capstan::kernels::cpu::exchange::Words;
use loom::sync::atomic::{AtomicU64, Ordering};

/// Words that are stored and loaded as the CPU device does.
pub struct Atomic(Vec<Option<AtomicU64>>);

/// Words whose stores and loads order nothing.
pub struct Loosely(Atomic);

impl Atomic {
    /// A buffer of each rank.
    pub fn all(world: usize, words: usize) -> Vec<Atomic> {
        (0..world).map(|_| Atomic::new(words)).collect()
    }

    /// Only the words that the models use, as `loom` follows each of them.
    fn new(words: usize) -> Atomic {
        let head = capstan::kernels::exchange::HEAD_WORDS as usize;
        let used = |at: &usize| *at >= head || is_of_two_ranks(*at);
        Atomic((0..words).map(|at| used(&at).then(|| AtomicU64::new(0))).collect())
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        self.0[index].as_ref().expect("the models use the words of ranks 0 and 1")
    }
}

/// True for a word of the agreement records of ranks 0 and 1.
fn is_of_two_ranks(word: usize) -> bool {
    use capstan::kernels::exchange::{AGREE_WORDS, agree_first};
    let records = (0..2).flat_map(|agreement| (0..2).map(move |rank| agree_first(agreement, rank) as usize));
    records.into_iter().any(|first| (first..first + AGREE_WORDS as usize).contains(&word))
}

impl Loosely {
    /// A buffer of each rank.
    pub fn all(world: usize, words: usize) -> Vec<Loosely> {
        Atomic::all(world, words).into_iter().map(Loosely).collect()
    }
}

impl Words for Atomic {
    fn load(&self, index: usize) -> u64 {
        self.word(index).load(Ordering::Acquire)
    }
    fn store(&self, index: usize, word: u64) {
        self.word(index).store(word, Ordering::Release);
    }
}

impl Words for Loosely {
    fn load(&self, index: usize) -> u64 {
        self.0.word(index).load(Ordering::Relaxed)
    }
    fn store(&self, index: usize, word: u64) {
        self.0.word(index).store(word, Ordering::Relaxed);
    }
}

/// A wait that never ends by itself: lets another rank run.
pub fn patiently() -> bool {
    loom::thread::yield_now();
    false
}

/// Runs `each` rank on every interleaving.
pub fn model<W: Send + Sync + 'static>(world: usize, new: impl Fn() -> Vec<W> + Send + Sync + 'static, each: fn(&[W], usize)) {
    loom::model(move || {
        let peers = Arc::new(new());
        let others: Vec<_> = (1..world)
            .map(|rank| {
                let peers = peers.clone();
                loom::thread::spawn(move || each(&peers, rank))
            })
            .collect();
        each(&peers, 0);
        others.into_iter().for_each(|rank| rank.join().unwrap());
    });
}
