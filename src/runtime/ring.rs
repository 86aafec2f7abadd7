//! The step ring: metadata slots to the device, result slots back, both in pinned memory.
//!
//! Step n uses slot n mod `slots`. The host writes a metadata slot's body, then its sequence number with release order; the
//! device's `ingest` takes the slot whose number is next. `publish` writes a result slot's body, then its number; the host reads
//! the number with acquire order. A slot is reused only once its result was taken, so nothing is lost. No allocation after
//! [`StepRing::new`].

use bytemuck::{Zeroable, bytes_of, cast_slice, pod_read_unaligned};

use crate::arena::PinnedView;
use crate::error::Error;
use crate::kernels::step::{self, BlockUpdate, ResultHeader, SequenceRecord, SlotHeader};

/// A token that no vocabulary has.
const UNPUBLISHED: i32 = i32::MIN;

/// Sizes of both rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLayout {
    /// Slots of each ring: steps that may be in flight.
    pub slots: u32,
    /// Sequences a slot holds.
    pub sequence_capacity: u32,
    /// Rows a slot holds.
    pub row_capacity: u32,
    /// Block-table updates a slot holds.
    pub update_capacity: u32,
}

/// A step that was queued; redeem it once for its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

impl Ticket {
    /// The step's number, from 1.
    pub fn sequence(self) -> u64 {
        self.0
    }
}

/// State of a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TicketState {
    /// Queued, no result yet.
    InFlight,
    /// The result is in its slot.
    Published,
    /// Taken already, or never issued.
    Unknown,
}

/// Both rings and where they stand.
#[derive(Debug)]
pub(super) struct StepRing {
    layout: RingLayout,
    slots: PinnedView,
    results: PinnedView,
    submitted: u64,
    // Per ring slot: the step whose result is still to be taken (0 if none) and the tokens it will hold.
    owed: Vec<(u64, u32)>,
    tokens: Vec<i32>,
}

impl StepRing {
    pub(super) fn new(layout: RingLayout, slots: PinnedView, results: PinnedView) -> StepRing {
        StepRing {
            layout,
            slots,
            results,
            submitted: 0,
            owed: vec![(0, 0); layout.slots as usize],
            tokens: vec![0; layout.row_capacity as usize],
        }
    }

    pub(super) fn layout(&self) -> &RingLayout {
        &self.layout
    }

    /// Errors if fewer than `steps` more steps can be queued.
    pub(super) fn room_for(&self, steps: u64) -> crate::Result<()> {
        let owed = (1..=steps).map(|ahead| self.owed[self.at(self.submitted + ahead)].0).find(|&owed| owed > 0);
        let slots = self.layout.slots;
        match owed {
            None if steps <= u64::from(slots) => Ok(()),
            None => Err(Error::state(format!("{steps} steps at once, the ring has {slots} slots")).help("raise ring_slots")),
            Some(owed) => Err(Error::state(format!("all {slots} ring slots are taken: step {owed} was not read"))
                .help("wait for the oldest ticket before queueing another step, or raise ring_slots")),
        }
    }

    /// Fills the next slot. Nothing is final until [`StepRing::commit`]: a failed launch leaves the slot to be filled again.
    pub(super) fn fill<'a>(
        &mut self,
        records: impl Iterator<Item = (SequenceRecord, &'a [i32])>,
        updates: &[BlockUpdate],
    ) -> Ticket {
        let sequence = self.submitted + 1;
        let base = self.at(sequence) as u64 * self.slot_bytes();
        // Number 0 is no step: `ingest` cannot mistake a half-written slot for the last round's.
        self.slots.store_release(base, 0);
        let mut header = SlotHeader { updates: updates.len() as u32, ..SlotHeader::zeroed() };
        let mut record_at = base + size_of::<SlotHeader>() as u64;
        let mut token_at = base + step::slot_tokens_offset(self.layout.sequence_capacity);
        for (record, tokens) in records {
            self.slots.write(record_at, bytes_of(&record));
            self.slots.write(token_at, cast_slice(tokens));
            record_at += size_of::<SequenceRecord>() as u64;
            token_at += size_of_val(tokens) as u64;
            header.live_sequences += 1;
            header.live_rows += tokens.len() as u32;
            header.kv_len_max = header.kv_len_max.max(record.kv_len);
        }
        let updates_at = base + step::slot_updates_offset(self.layout.sequence_capacity, self.layout.row_capacity);
        self.slots.write(updates_at, cast_slice(updates));
        self.slots.write(base + 8, &bytes_of(&header)[8..]);
        self.slots.store_release(base, sequence);
        Ticket(sequence)
    }

    /// The step of `ticket` was queued on the device and will publish `tokens` tokens.
    pub(super) fn commit(&mut self, ticket: Ticket, tokens: u32) {
        assert_eq!(ticket.0, self.submitted + 1, "invariant: steps are committed in the order they are filled");
        self.submitted = ticket.0;
        let at = self.at(ticket.0);
        self.owed[at] = (ticket.0, tokens);
    }

    pub(super) fn state(&self, ticket: Ticket) -> TicketState {
        let at = self.at(ticket.0);
        if self.owed[at].0 != ticket.0 || ticket.0 == 0 {
            return TicketState::Unknown;
        }
        match self.results.load_acquire(at as u64 * self.result_bytes()) == ticket.0 {
            true => TicketState::Published,
            false => TicketState::InFlight,
        }
    }

    /// The head of a published result.
    pub(super) fn header(&self, ticket: Ticket) -> ResultHeader {
        assert_eq!(self.state(ticket), TicketState::Published, "invariant: only published results are taken");
        let mut bytes = [0u8; size_of::<ResultHeader>()];
        self.results.read(self.at(ticket.0) as u64 * self.result_bytes(), &mut bytes);
        pod_read_unaligned(&bytes)
    }

    /// Copies a published result out and frees its slot.
    pub(super) fn take(&mut self, ticket: Ticket) -> &[i32] {
        assert_eq!(self.state(ticket), TicketState::Published, "invariant: only published results are taken");
        let at = self.at(ticket.0);
        let base = at as u64 * self.result_bytes();
        let tokens = self.owed[at].1 as usize;
        self.results.read(base + size_of::<ResultHeader>() as u64, bytemuck::cast_slice_mut(&mut self.tokens[..tokens]));
        self.owed[at] = (0, 0);
        &self.tokens[..tokens]
    }

    /// Overwrites the tokens of the result slot that `ticket` will be answered in, ahead of the step.
    pub(super) fn poison_result(&self, ticket: Ticket, tokens: u32) {
        let base = self.at(ticket.0) as u64 * self.result_bytes() + size_of::<ResultHeader>() as u64;
        (0..u64::from(tokens)).for_each(|row| self.results.write(base + row * 4, bytes_of(&UNPUBLISHED)));
    }

    /// The first of a published step's tokens that nobody wrote since [`StepRing::poison_result`].
    pub(super) fn unpublished(&self, ticket: Ticket, tokens: u32) -> Option<u32> {
        let base = self.at(ticket.0) as u64 * self.result_bytes() + size_of::<ResultHeader>() as u64;
        (0..tokens).find(|&row| {
            let mut token = [0; 4];
            self.results.read(base + u64::from(row) * 4, &mut token);
            i32::from_ne_bytes(token) == UNPUBLISHED
        })
    }

    /// Frees a slot without a result: the device ended without publishing, or runs nothing.
    pub(super) fn abandon(&mut self, ticket: Ticket) {
        let at = self.at(ticket.0);
        self.owed[at] = (0, 0);
    }

    /// Steps queued so far.
    pub(super) fn submitted(&self) -> u64 {
        self.submitted
    }

    /// The oldest step whose result was not taken yet.
    pub(super) fn oldest(&self) -> Option<Ticket> {
        self.owed.iter().map(|&(sequence, _)| sequence).filter(|&sequence| sequence > 0).min().map(Ticket)
    }

    fn at(&self, sequence: u64) -> usize {
        (sequence % u64::from(self.layout.slots)) as usize
    }

    fn slot_bytes(&self) -> u64 {
        step::slot_bytes(self.layout.sequence_capacity, self.layout.row_capacity, self.layout.update_capacity)
    }

    fn result_bytes(&self) -> u64 {
        step::result_bytes(self.layout.row_capacity)
    }
}
