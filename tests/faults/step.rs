//! Faults of steps: memory and rings damaged while serving, kernels that do not do what they declare.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use capstan::Result;
use capstan::arena::{BufferId, PinnedView, Purpose};
use capstan::chain::{StepChains, pointer};
use capstan::engine::Steps;
use capstan::hal::{Device, DevicePtr};
use capstan::kernels::KernelSpec;
use capstan::kernels::step::{BlockUpdate, PublishArgs, SequenceRecord, SlotHeader, slot_bytes, slot_updates_offset};
use capstan::measure::Watched;
use capstan::runtime::{Checks, Executor, Sampling, SequenceStep};

use super::chain::with_double;
use super::damaged::{Damaged, add_buffer, edit, insert};
use super::liar::Lies;
use super::rig::{Fault, ROWS, Rig, msa};
use super::user::{self, ARMED, LiveRowsArgs, PokeArgs};

/// Every step audited.
const EVERY_STEP: Checks =
    Checks { self_test: None, audit_every: Some(1), poison_free_blocks: true, each_node: false, shadow_every: None };

/// Captures while the faulty kernels behave, then runs one audited step while they do not.
fn armed(chains: Damaged, checks: Checks) -> Result<()> {
    let mut rig = Rig::of(chains)?;
    rig.executor.set_checks(checks);
    rig.decode()?;
    ARMED.store(true, Ordering::Relaxed);
    let caught = rig.decode().map(drop);
    ARMED.store(false, Ordering::Relaxed);
    caught
}

fn kernel(kernel: &'static KernelSpec) -> Damaged {
    with_double(&[kernel], kernel)
}

/// The slot of the step that is about to be replayed.
struct Slot {
    ring: PinnedView,
    base: u64,
    updates_at: u64,
    ring_slots: u64,
}

impl Slot {
    fn number(&self) -> u64 {
        self.ring.load_acquire(self.base)
    }

    fn set_number(&self, number: u64) {
        self.ring.store_release(self.base, number);
    }

    fn header(&self, change: impl FnOnce(&mut SlotHeader)) {
        self.change(self.base, change);
    }

    fn record(&self, change: impl FnOnce(&mut SequenceRecord)) {
        self.change(self.base + size_of::<SlotHeader>() as u64, change);
    }

    fn change<T: bytemuck::Pod>(&self, at: u64, change: impl FnOnce(&mut T)) {
        let mut value = T::zeroed();
        self.ring.read(at, bytemuck::bytes_of_mut(&mut value));
        change(&mut value);
        self.ring.write(at, bytemuck::bytes_of(&value));
    }
}

/// Replays one step whose ring slot `damage` changed between the host's write and the launch.
fn slot(damage: fn(&Slot)) -> Result<()> {
    let mut rig = Rig::captured(msa())?;
    rig.decode()?;
    let layout = *rig.executor.chains().step_layout();
    let ring = rig.executor.chains().step().ring;
    let arena = rig.executor.arena().clone();
    let bytes = slot_bytes(layout.sequence_capacity, layout.row_capacity, layout.update_capacity);
    let find = move || {
        let ring = arena.pinned(ring).unwrap();
        let newest = (0..u64::from(layout.ring_slots)).max_by_key(|at| ring.load_acquire(at * bytes)).unwrap();
        let updates_at = newest * bytes + slot_updates_offset(layout.sequence_capacity, layout.row_capacity);
        Slot { ring, base: newest * bytes, updates_at, ring_slots: layout.ring_slots.into() }
    };
    rig.liar.lie(Lies { replay: Some(Arc::new(move || damage(&find()))), ..Lies::default() });
    let caught = rig.decode().map(drop);
    rig.liar.lie(Lies::default());
    // One bad step spoils no other.
    rig.decode()?;
    caught
}

/// Writes to the device's memory behind the executor's back, then audits.
fn overwrite(address: impl Fn(&Rig) -> u64, bytes: &[u8]) -> Result<()> {
    let mut rig = Rig::captured(msa())?;
    rig.decode()?;
    let stream = rig.liar.create_stream()?;
    // SAFETY: inside a slab of the rig's arena, which is idle: the damage that the test wants.
    unsafe { stream.write(DevicePtr(address(&rig)), bytes) }?;
    rig.executor.audit()
}

pub static FAULTS: &[Fault] = &[
    Fault {
        name: "a buffer moved between capture and replay",
        caught_by: "ADDR-2",
        names: &["graph rows=4", "was recorded against other buffers"],
        run: || {
            let mut rig = Rig::captured(msa())?;
            rig.executor.arena().ledger().pretend_moved(BufferId(3));
            rig.decode().map(drop)
        },
    },
    Fault {
        name: "a buffer moved, found by the audit",
        caught_by: "ADDR-2",
        names: &["graph rows=4", "was recorded against other buffers"],
        run: || {
            let rig = Rig::captured(msa())?;
            rig.executor.arena().ledger().pretend_moved(BufferId(3));
            rig.executor.audit()
        },
    },
    Fault {
        name: "a ring slot that the host never finished",
        caught_by: "ADDR-2",
        names: &["waited for ring slot", "found 0"],
        run: || slot(|slot| slot.set_number(0)),
    },
    Fault {
        name: "a ring slot of an older generation",
        caught_by: "ADDR-2",
        names: &["waited for ring slot", "and found"],
        run: || slot(|slot| slot.set_number(slot.number().saturating_sub(slot.ring_slots))),
    },
    Fault {
        name: "a ring slot of a newer generation",
        caught_by: "ADDR-2",
        names: &["waited for ring slot", "and found"],
        run: || slot(|slot| slot.set_number(slot.number() + slot.ring_slots)),
    },
    Fault {
        name: "more sequences in the slot than the graph was captured for",
        caught_by: "KEY-1",
        names: &["the slot holds 5 entries, the graph was captured for 4"],
        run: || slot(|slot| slot.header(|header| header.live_sequences = ROWS + 1)),
    },
    Fault {
        name: "rows in the slot that do not add up",
        caught_by: "KEY-1",
        names: &["the slot holds"],
        run: || slot(|slot| slot.header(|header| header.live_rows = 3)),
    },
    Fault {
        name: "a query length that is not the graph's",
        caught_by: "KEY-1",
        names: &["the slot holds 2 entries, the graph was captured for 1"],
        run: || slot(|slot| slot.record(|record| record.query_len = 2)),
    },
    Fault {
        name: "a block-table row that does not exist",
        caught_by: "PAGE-1",
        names: &["out of range"],
        run: || slot(|slot| slot.record(|record| record.slot = 77)),
    },
    Fault {
        name: "a block-table update past the cache",
        caught_by: "PAGE-1",
        names: &["is 9999, out of range"],
        run: || {
            slot(|slot| {
                slot.change(slot.updates_at, |update: &mut BlockUpdate| update.block = 9999);
                slot.header(|header| header.updates = 1);
            })
        },
    },
    Fault {
        name: "a block in two sequences",
        caught_by: "PAGE-1",
        names: &["block 9 belongs to the sequence in table row 0"],
        run: || {
            let mut rig = Rig::captured(msa())?;
            let second = rig.executor.open_sequence()?;
            rig.executor.grant_blocks(second, &[9])
        },
    },
    Fault {
        name: "a block twice in one sequence",
        caught_by: "PAGE-1",
        names: &["block 100 is in this sequence already"],
        run: || {
            let mut rig = Rig::captured(msa())?;
            rig.executor.grant_blocks(rig.sequences[0].0, &[100, 100])
        },
    },
    Fault {
        name: "the device's block table overwritten",
        caught_by: "PAGE-1",
        names: &["step.block_table row 0 entry 1", "expected block 10, found block 63"],
        run: || overwrite(|rig| rig.address("step.block_table") + 4, &63u32.to_ne_bytes()),
    },
    Fault {
        name: "a guard band overwritten by a copy",
        caught_by: "GUARD-1",
        names: &["between attention.q and attention.index_q"],
        run: || overwrite(|rig| rig.address("attention.q") + rig.bytes("attention.q"), &[0; 4]),
    },
    Fault {
        name: "the last guard band of the slab overwritten",
        caught_by: "GUARD-1",
        names: &["and the end of the slab"],
        run: || {
            overwrite(
                |rig| {
                    let plan = rig.executor.arena().plan();
                    let ends = plan.buffers.iter().filter(|buffer| buffer.spec.memory == capstan::hal::MemoryKind::Device);
                    let last = ends.max_by_key(|buffer| buffer.offset).unwrap();
                    rig.address(&last.spec.name) + last.bytes + 100
                },
                &[1],
            )
        },
    },
    Fault {
        name: "a kernel that writes one element past its buffer",
        caught_by: "GUARD-1",
        names: &["between user.y and the end of the slab"],
        run: || armed(kernel(&user::OVERRUN), EVERY_STEP),
    },
    Fault {
        name: "the same, looked at node by node",
        caught_by: "GUARD-1",
        names: &["node 1 user.double", "between user.y and the end of the slab"],
        run: || armed(kernel(&user::OVERRUN), Checks { each_node: true, ..EVERY_STEP }),
    },
    Fault {
        name: "a kernel that writes one element before its buffer",
        caught_by: "GUARD-1",
        names: &["between user.x and user.y"],
        run: || armed(kernel(&user::UNDERRUN), EVERY_STEP),
    },
    Fault {
        name: "a kernel that leaves its last element out",
        caught_by: "PAD-1",
        names: &["node 1 user.double.y", "buffer user.y", "1 left unwritten, the first is number 63"],
        run: || armed(kernel(&user::SHORT), EVERY_STEP),
    },
    Fault {
        name: "a kernel that writes nothing",
        caught_by: "PAD-1",
        names: &["node 1 user.double.y", "64 left unwritten, the first is number 0"],
        run: || armed(kernel(&user::IDLE), EVERY_STEP),
    },
    Fault {
        name: "the same behind a node that fills the buffer, looked at node by node",
        caught_by: "PAD-1",
        names: &["node 2 user.double.y", "64 left unwritten"],
        run: || {
            let masked = with_double(&[&user::IDLE, &user::DOUBLE], &user::IDLE).then(|chain, _| {
                let mut first = chain.ops[1].clone();
                (first.label, first.kernel) = ("user.first".into(), &user::DOUBLE);
                chain.ops.insert(1, first);
            });
            armed(masked, Checks { each_node: true, ..EVERY_STEP })
        },
    },
    Fault {
        name: "a kernel that forgets the pad rows",
        caught_by: "PAD-1",
        names: &["user.live_rows.y", "3 left unwritten, the first is number 1"],
        run: || {
            let mut plan = msa().plan().clone();
            let y = add_buffer(&mut plan, "user.y", ROWS.into(), Purpose::Activations);
            let args = LiveRowsArgs { row_len: pointer(msa().step().row_len), y: pointer(y), rows: ROWS, reserved: 0 };
            let damaged = Damaged::new(msa(), move |chain, _| insert(chain, "user.live_rows", &user::LIVE_ROWS, &args));
            armed(damaged.plan(|old| *old = plan).kernel(&user::LIVE_ROWS), EVERY_STEP)
        },
    },
    Fault {
        name: "a pad row that writes to a cache block",
        caught_by: "PAD-2",
        names: &["buffer layer0.kv_cache", "block 0, which no sequence holds"],
        run: || {
            let damaged = Damaged::new(msa(), |chain, _| {
                let cache = msa().plan().find("layer0.kv_cache").unwrap();
                insert(chain, "user.poke", &user::POKE, &PokeArgs { y: pointer(cache), n: 4, factor: 0 });
            });
            armed(damaged.kernel(&user::POKE), EVERY_STEP)
        },
    },
    Fault {
        name: "a token that was not published",
        caught_by: "PAD-1",
        names: &["buffer step.results", "expected 4 published tokens, found none for row 3"],
        run: || {
            let damaged = Damaged::new(msa(), |chain, key| {
                edit::<PublishArgs>(chain, "publish", |args| args.rows = key.rows().min(ROWS - 1));
            });
            let mut rig = Rig::of(damaged)?;
            (1..ROWS).try_for_each(|_| rig.open(20).map(drop))?;
            rig.executor.set_checks(EVERY_STEP);
            rig.decode().map(drop)
        },
    },
    Fault {
        name: "a result that depends on the padding",
        caught_by: "PAD-3",
        names: &["decode step", "the unpadded eager run"],
        run: || padded_otherwise().map(drop),
    },
];

/// A chain whose rows are scaled by how many there are, replayed beside an unpadded eager run.
fn padded_otherwise() -> Result<()> {
    let scaled = || -> Arc<dyn StepChains> {
        let out = msa().plan().find("attention.out").unwrap();
        let damaged = Damaged::new(msa(), move |chain, key| {
            insert(chain, "user.poke", &user::POKE, &PokeArgs { y: pointer(out), n: 16, factor: key.rows() });
            let (poke, sample) = (chain.ops.remove(1), chain.ops.len() - 2);
            chain.ops.insert(sample, poke);
        });
        Arc::new(damaged.kernel(&user::POKE))
    };
    let device: Arc<dyn Device> = Arc::new(Rig::new(msa())?.liar);
    let mut fresh = Executor::new(&device, scaled())?;
    fresh.capture(|_| ())?;
    let mut watched = Watched::new(fresh, Some(Executor::new(&device, scaled())?))?;
    let id = watched.open()?;
    watched.grant(id, &[4, 5, 6])?;
    for kv_len in 1..30 {
        let batch = [SequenceStep { sequence: id, tokens: &[kv_len as i32], kv_len, sampling: Sampling::GREEDY }];
        Steps::decode(&mut watched, &batch)?;
    }
    Ok(())
}
