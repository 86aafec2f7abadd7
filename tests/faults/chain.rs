//! Faults of chains and plans: what a chain's author gets wrong, found at lowering, at warm-up or at capture.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use capstan::Result;
use capstan::arena::Purpose;
use capstan::chain::{Chain, GraphKey, Order, StepChains, pointer};
use capstan::kernels::msa::NormRopeInsertArgs;
use capstan::kernels::step::{EmbedArgs, IngestArgs, PublishArgs};
use capstan::kernels::{KernelSpec, Ptr};

use super::damaged::{Damaged, add_buffer, edit, insert, op};
use super::rig::{Fault, ROWS, Rig, msa};
use super::user::{self, DoubleArgs, ObserveArgs, SEEN};

/// Captures chains with a mistake.
fn capture(edit: impl Fn(&mut Chain, &GraphKey) + Send + Sync + 'static) -> Result<()> {
    Rig::of(Damaged::new(msa(), edit)).map(drop)
}

/// Chains with a user's op `user.double` of `launched` on two buffers of its own, and `declared` kernels.
pub fn with_double(declared: &[&'static KernelSpec], launched: &'static KernelSpec) -> Damaged {
    let (mut plan, n) = (msa().plan().clone(), 64);
    let x = add_buffer(&mut plan, "user.x", n, Purpose::Weights);
    let y = add_buffer(&mut plan, "user.y", n, Purpose::Activations);
    let args = DoubleArgs { x: pointer(x), y: pointer(y), n: n as u32, reserved: 0 };
    let damaged = Damaged::new(msa(), move |chain, _| insert(chain, "user.double", launched, &args));
    declared.iter().fold(damaged.plan(|old| *old = plan), |damaged, kernel| damaged.kernel(kernel))
}

/// Captures chains with a user's op whose arguments `change` damaged.
fn double_args(change: fn(&mut smallvec::SmallVec<[u8; 256]>)) -> Result<()> {
    let damaged = with_double(&[&user::DOUBLE], &user::DOUBLE);
    Rig::of(damaged.then(move |chain, _| change(&mut op(chain, "user.double").args))).map(drop)
}

/// Captures chains with an op that watches lengths; `mistake` takes the longest one into the chain.
fn observed(mistake: fn(&mut Chain, u32)) -> Result<()> {
    let lens = msa().step().seq_len;
    let damaged = Damaged::new(msa(), move |chain, key| {
        insert(
            chain,
            "user.observe",
            &user::OBSERVE,
            &ObserveArgs { seq_len: pointer(lens), sequences: key.sequences, longest: 0 },
        );
        mistake(chain, SEEN.load(Ordering::Relaxed));
    });
    Rig::of(damaged.kernel(&user::OBSERVE)).map(drop)
}

/// The chain as a list of edges, without some of them.
fn edges_without(chain: &mut Chain, missing: &[(u32, u32)]) {
    let line = (1..chain.ops.len() as u32).map(|after| (after - 1, after));
    chain.order = Order::Edges(line.filter(|edge| !missing.contains(edge)).collect());
}

pub static FAULTS: &[Fault] = &[
    Fault {
        name: "an extent one row past the buffer",
        caught_by: "ADDR-1",
        names: &["embed.table", "do not fit buffer msa.table"],
        run: || capture(|chain, _| edit::<EmbedArgs>(chain, "embed", |args| args.vocab += 1)),
    },
    Fault {
        name: "an offset past the buffer's end",
        caught_by: "ADDR-1",
        names: &["layer1.norm_rope_insert.q_norm", "do not fit buffer layer1.q_norm"],
        run: || {
            capture(|chain, _| {
                edit::<NormRopeInsertArgs>(chain, "layer1.norm_rope_insert", |args| {
                    let (buffer, offset) = args.q_norm.as_symbol().unwrap();
                    args.q_norm = Ptr::symbol(buffer, offset + 4096);
                });
            })
        },
    },
    Fault {
        name: "a pointer to a buffer of another plan",
        caught_by: "ADDR-1",
        names: &["embed.out", "buffer number 4000 is not in the plan"],
        run: || capture(|chain, _| edit::<EmbedArgs>(chain, "embed", |args| args.out = Ptr::symbol(4000, 0))),
    },
    Fault {
        name: "a raw address in a chain",
        caught_by: "ADDR-1",
        names: &["embed.out", "is no symbol"],
        run: || capture(|chain, _| edit::<EmbedArgs>(chain, "embed", |args| args.out = Ptr(4096))),
    },
    Fault {
        name: "null where the kernel needs a buffer",
        caught_by: "ADDR-1",
        names: &["embed.tokens", "is no symbol"],
        run: || capture(|chain, _| edit::<EmbedArgs>(chain, "embed", |args| args.tokens = Ptr::NULL)),
    },
    Fault {
        name: "a user's argument struct with a field too many",
        caught_by: "ADDR-1",
        names: &["user.double", "32 bytes of arguments", "declares 24"],
        run: || double_args(|args| args.extend_from_slice(&[0; 8])),
    },
    Fault {
        name: "a user's argument struct with a field missing",
        caught_by: "ADDR-1",
        names: &["user.double", "20 bytes of arguments", "declares 24"],
        run: || double_args(|args| args.truncate(20)),
    },
    Fault {
        name: "a kernel compiled for another argument struct than declared",
        caught_by: "device",
        names: &["kernel misdeclared", "compiled for another argument struct"],
        run: || {
            let mut plan = msa().plan().clone();
            let (x, y) =
                (add_buffer(&mut plan, "user.x", 8, Purpose::Weights), add_buffer(&mut plan, "user.y", 8, Purpose::Weights));
            let args = user::DoubleFactorArgs { x: pointer(x), y: pointer(y), n: 8, reserved: 0, factor: 2 };
            let damaged = Damaged::new(msa(), move |chain, _| insert(chain, "user.double", &user::MISDECLARED, &args));
            Rig::of(damaged.plan(|old| *old = plan).kernel(&user::MISDECLARED)).map(drop)
        },
    },
    Fault {
        name: "a kernel that nobody declared",
        caught_by: "state",
        names: &["kernel double was not declared"],
        run: || Rig::of(with_double(&[], &user::DOUBLE)).map(drop),
    },
    Fault {
        name: "two kernels of one name, both declared",
        caught_by: "state",
        names: &["two kernels are called double"],
        run: || Rig::of(with_double(&[&user::DOUBLE, &user::DOUBLE_AGAIN], &user::DOUBLE)).map(drop),
    },
    Fault {
        name: "two kernels of one name, the other one launched",
        caught_by: "state",
        names: &["another kernel called double was declared"],
        run: || Rig::of(with_double(&[&user::DOUBLE], &user::DOUBLE_AGAIN)).map(drop),
    },
    Fault {
        name: "two buffers at one address, no alias declared",
        caught_by: "ADDR-3",
        names: &["buffer attention.out", "shared with attention.q"],
        run: || {
            let damaged = Damaged::new(msa(), |_, _| ()).plan(|plan| {
                let (q, out) = (plan.find("attention.q").unwrap(), plan.find("attention.out").unwrap());
                plan.buffers[out.0 as usize].offset = plan.buffer(q).offset;
            });
            Rig::of(damaged).map(drop)
        },
    },
    Fault {
        name: "two buffers that overlap by one alignment",
        caught_by: "ADDR-3",
        names: &["buffer user.x", "256 bytes shared with user.y"],
        run: || {
            let damaged = with_double(&[&user::DOUBLE], &user::DOUBLE).plan(|plan| {
                let x = add_buffer(plan, "user.x2", 256, Purpose::Weights);
                let (x_end, y) = (plan.buffer(x).offset + plan.buffer(x).bytes, plan.find("user.y").unwrap());
                plan.buffers[x.0 as usize].spec.name = "user.x".into();
                plan.buffers[y.0 as usize].offset = x_end - 256;
            });
            Rig::of(damaged).map(drop)
        },
    },
    Fault {
        name: "a buffer that ends past its slab",
        caught_by: "ADDR-1",
        names: &["buffer user.y", "do not fit the Device slab"],
        run: || {
            let damaged = with_double(&[&user::DOUBLE], &user::DOUBLE).plan(|plan| {
                let y = plan.find("user.y").unwrap();
                plan.buffers[y.0 as usize].bytes += 4096;
            });
            Rig::of(damaged).map(drop)
        },
    },
    Fault {
        name: "metadata for 3 rows under a graph of 4",
        caught_by: "KEY-1",
        names: &["the slot holds 4 entries, the graph was captured for 3"],
        run: || {
            capture(|chain, key| {
                edit::<IngestArgs>(chain, "ingest", |args| (args.sequences, args.rows) = (key.rows() - 1, key.rows() - 1));
            })
        },
    },
    Fault {
        name: "an op shaped for 3 rows in a chain of 4",
        caught_by: "PAD-1",
        names: &["node 2", "layer0.norm_rope_insert.packed", "buffer attention.packed", "nobody writes from offset"],
        run: || {
            capture(|chain, key| {
                edit::<EmbedArgs>(chain, "embed", |args| args.rows = key.rows() - 1);
                op(chain, "embed").shape.grid[0] = key.rows() - 1;
            })
        },
    },
    Fault {
        name: "no publish at the end of the chain",
        caught_by: "device",
        names: &["ended without publishing a result"],
        run: || capture(|chain, _| drop(chain.ops.pop())),
    },
    Fault {
        name: "no ingest at the start of the chain",
        caught_by: "device",
        names: &["ended without publishing a result"],
        run: || capture(|chain, _| drop(chain.ops.remove(0))),
    },
    Fault {
        name: "a length of the dummy batch baked into an argument",
        caught_by: "BAKE-1",
        names: &["node 1", "user.observe.longest", "expected 512 as in the first capture"],
        run: || observed(|chain, seen| edit::<ObserveArgs>(chain, "user.observe", |args| args.longest = seen)),
    },
    Fault {
        name: "a grid made for the dummy batch",
        caught_by: "BAKE-1",
        names: &["node 4", "layer0.score", "expected grid [32, 4, 1]", "as in the first capture, found grid [2, 4, 1]"],
        run: || observed(|chain, seen| op(chain, "layer0.score").shape.grid[0] = seen.div_ceil(16).max(1)),
    },
    Fault {
        name: "an op left out because the dummy batch was short",
        caught_by: "BAKE-1",
        names: &["node 2", "expected kernel observe as in the first capture", "found kernel embed"],
        run: || {
            observed(|chain, seen| {
                if seen >= 100 {
                    let mut again = chain.ops[1].clone();
                    again.label = "user.observe_long".into();
                    chain.ops.insert(2, again);
                }
            })
        },
    },
    Fault {
        name: "a buffer chosen by the dummy batch",
        caught_by: "BAKE-1",
        names: &["node 1", "user.observe.seq_len", "step.seq_len+0 as in the first capture", "step.row_len+0"],
        run: || {
            observed(|chain, seen| {
                if seen < 100 {
                    let row_len = msa().step().row_len;
                    edit::<ObserveArgs>(chain, "user.observe", |args| args.seq_len = pointer(row_len));
                }
            })
        },
    },
    Fault {
        name: "a random seed drawn at capture",
        caught_by: "BAKE-1",
        names: &["node 12", "publish.reserved", "as in the first capture"],
        run: || {
            static DRAWS: AtomicU32 = AtomicU32::new(0);
            observed(|chain, _| {
                edit::<PublishArgs>(chain, "publish", |args| args.reserved = DRAWS.fetch_add(1, Ordering::Relaxed));
            })
        },
    },
    Fault {
        name: "a dependency between branches forgotten",
        caught_by: "RACE-1",
        names: &["node 5", "layer0.attend.page_", "node 4 layer0.topk_emit, which writes it"],
        run: || capture(|chain, _| edges_without(chain, &[(4, 5)])),
    },
    Fault {
        name: "two branches that write one buffer",
        caught_by: "RACE-1",
        names: &["node 2 user.double.y (buffer user.y)", "node 1 user.again, which writes it", "it writes 256 bytes"],
        run: || {
            let damaged = with_double(&[&user::DOUBLE], &user::DOUBLE).then(|chain, _| {
                let mut again = chain.ops[1].clone();
                again.label = "user.again".into();
                chain.ops.insert(1, again);
                edges_without(chain, &[(1, 2), (2, 3)]);
                let Order::Edges(edges) = &mut chain.order else { return };
                edges.extend([(0, 2), (1, 3), (2, 3)]);
            });
            Rig::of(damaged).map(drop)
        },
    },
    Fault {
        name: "an edge that points back",
        caught_by: "state",
        names: &["edge 5 -> 4 does not point forward"],
        run: || {
            capture(|chain, _| {
                edges_without(chain, &[]);
                let Order::Edges(edges) = &mut chain.order else { return };
                edges.push((5, 4));
            })
        },
    },
];

/// A user's kernel on a branch of its own is no race: declared, ordered and audited like any other.
pub fn branch() -> Arc<dyn StepChains> {
    let branched = with_double(&[&user::DOUBLE], &user::DOUBLE).then(|chain, key| {
        assert!(key.sequences <= ROWS);
        // ingest -> double -> publish, beside the rest of the line.
        edges_without(chain, &[(1, 2)]);
        let last = chain.ops.len() as u32 - 1;
        let Order::Edges(edges) = &mut chain.order else { return };
        edges.extend([(0, 2), (1, last)]);
    });
    Arc::new(branched)
}
