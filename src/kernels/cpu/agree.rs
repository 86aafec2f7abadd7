//! `agree`: the ranks compare what they are about to run (RANK-1).
//!
//! The protocol stands in [`publish`] and [`await_record`], over any [`Words`], so that `loom` can run it.

use super::exchange::{Patience, Words, end_group, has_error, record};
use super::view::{Bound, ViewMut};
use crate::hal::Workgroup;
use crate::kernels::exchange::{AgreeArgs, Differs, POISON_WORD, RANKS_MAX, agree_first};
use crate::kernels::step::{StepError, StepState};

/// What a rank runs: the words of a record but for its number.
pub type Record = [u64; 3];

/// Stores a record at `at`, its number last: who sees the number sees the record.
pub fn publish<W: Words>(words: &W, at: usize, record: &Record, agreement: u64) {
    record.iter().enumerate().for_each(|(word, &value)| words.store(at + word, value));
    words.store(at + record.len(), agreement);
}

/// Waits for a record of this agreement or a later one; gives its number and the record, or `None` once `give_up` says so.
pub fn await_record<W: Words>(words: &W, at: usize, agreement: u64, give_up: &mut impl FnMut() -> bool) -> Option<(u64, Record)> {
    loop {
        let found = words.load(at + size_of::<Record>() / size_of::<u64>());
        if found >= agreement {
            return Some((found, std::array::from_fn(|word| words.load(at + word))));
        }
        if give_up() {
            return None;
        }
    }
}

/// Compares with every rank.
pub fn agree(args: &Bound<'_, AgreeArgs>, _: &mut Workgroup<'_>) {
    assert!(args.world <= RANKS_MAX && args.rank < args.world, "rank {} of {}", args.rank, args.world);
    let peers: [Option<ViewMut<'_, u64>>; RANKS_MAX as usize] = std::array::from_fn(|rank| {
        (rank < args.world as usize).then(|| match rank {
            0 => args.write(|a| &a.peer0),
            1 => args.write(|a| &a.peer1),
            2 => args.write(|a| &a.peer2),
            3 => args.write(|a| &a.peer3),
            4 => args.write(|a| &a.peer4),
            5 => args.write(|a| &a.peer5),
            6 => args.write(|a| &a.peer6),
            _ => args.write(|a| &a.peer7),
        })
    });
    let own = peers[args.rank as usize].as_ref().expect("invariant: ranks are below world");
    let mut counter = args.write::<u64>(|a| &a.agreements);
    let agreement = counter.get(0) + 1;
    counter.set(0, agreement);
    let mut state = args.write::<u8>(|a| &a.state);
    let before: StepState = bytemuck::pod_read_unaligned(state.slice_mut(0, size_of::<StepState>()));
    let ours = of_this_rank(args, &before);
    let at = agree_first(agreement, args.rank) as usize;
    for peer in peers.iter().flatten() {
        publish(peer, at, &ours, agreement);
    }
    for rank in 0..args.world {
        let at = agree_first(agreement, rank) as usize;
        let mut patience = Patience::new(own, args.budget_us);
        let Some((found, theirs)) = await_record(own, at, agreement, &mut || patience.is_over()) else {
            let step = before.sequence as u32;
            match own.load(POISON_WORD as usize) {
                0 => {
                    record(&mut state, StepError::PeerAbsent, [rank, agreement as u32, step]);
                    end_group(&peers, args.rank);
                }
                ended => record(&mut state, StepError::PeerEnded, [ended as u32 - 1, 0, 0]),
            }
            return;
        };
        // A step that failed already waits like any other, so that no record is overwritten before it was read.
        if !has_error(&state)
            && let Some((differs, ours, theirs)) = difference((agreement, &ours), (found, &theirs))
        {
            record(&mut state, StepError::PeerMismatch, [rank | (differs as u32) << 16, ours, theirs]);
        }
    }
}

/// [rows, query length | step, graph | batch]; a step that failed already is no graph.
fn of_this_rank(args: &Bound<'_, AgreeArgs>, state: &StepState) -> Record {
    let lens = args.read::<i32>(|a| &a.seq_len);
    let lens = lens.slice(0, args.sequences as usize);
    // A sum, so that lanes can share it.
    let parts = lens.iter().zip(1u64..).map(|(&len, at)| mix(at << 32 | u64::from(len as u32)));
    let batch = parts.fold(mix(u64::from(state.live_rows)), u64::wrapping_add);
    let graph = if state.error == 0 { args.graph } else { !args.graph };
    [
        u64::from(args.rows) | u64::from(args.query_len) << 32,
        state.sequence & 0xffff_ffff | u64::from(graph) << 32,
        (batch ^ batch >> 32) & 0xffff_ffff,
    ]
}

/// A hash of a word: the finaliser of splitmix64.
fn mix(word: u64) -> u64 {
    let word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

/// The first thing in which two records differ, and both sides of it.
fn difference(ours: (u64, &Record), theirs: (u64, &Record)) -> Option<(Differs, u32, u32)> {
    let part = |(agreement, record): (u64, &Record), differs| match differs {
        Differs::Calls => agreement as u32,
        Differs::Rows => record[0] as u32,
        Differs::QueryLength => (record[0] >> 32) as u32,
        Differs::Step => record[1] as u32,
        Differs::Graph => (record[1] >> 32) as u32,
        Differs::Batch => record[2] as u32,
    };
    let sides = Differs::ALL.map(|differs| (differs, part(ours, differs), part(theirs, differs)));
    sides.into_iter().find(|(_, ours, theirs)| ours != theirs)
}
