//! Launches of every kernel on random inputs, for any executor: the CPU ops, a GPU, the device sources on the host.
//!
//! A [`Case`] is one launch with all memory behind its pointers; two executors must leave the same bytes, everywhere, in what they
//! write and in what they must not touch.

#![allow(dead_code, clippy::allow_attributes, reason = "each test that includes this uses a part of it")]

pub mod attention;
pub mod exchange;
pub mod model;
pub mod ops;
pub mod step;

use bytemuck::{Pod, bytes_of, cast_slice};
use capstan::DType;
use capstan::hal::LaunchShape;
use capstan::kernels::cpu::fp8::F8E4M3;
use capstan::kernels::{KernelArgs, KernelSpec, Ptr};
use capstan::random::Random;
use half::bf16;

/// How results are compared.
#[derive(Clone, Copy, Debug)]
pub enum Compare {
    /// Bit for bit, but that any NaN equals any other.
    Exact,
    /// Floats within `abs + rel * |expected|`; the same NaN and infinities.
    Close { abs: f32, rel: f32 },
}

/// Memory behind one pointer field.
#[derive(Clone)]
pub struct Buffer {
    pub field: &'static str,
    pub dtype: DType,
    pub bytes: Vec<u8>,
    pub compare: Compare,
}

/// One launch.
#[derive(Clone)]
pub struct Case {
    pub name: String,
    pub kernel: &'static KernelSpec,
    pub shape: LaunchShape,
    pub args: Vec<u8>,
    pub buffers: Vec<Buffer>,
}

impl Case {
    /// A launch without memory yet.
    pub fn new<A: KernelArgs>(name: impl Into<String>, kernel: &'static KernelSpec, grid: [u32; 3], args: &A) -> Case {
        assert_eq!(kernel.args.name, A::LAYOUT.name);
        let shape = LaunchShape { grid, workgroup: [256, 1, 1], lds_bytes: 0 };
        Case { name: format!("{} {}", kernel.symbol, name.into()), kernel, shape, args: bytes_of(args).to_vec(), buffers: vec![] }
    }

    /// Puts memory behind a pointer.
    pub fn with<T: Pod>(self, field: &'static str, values: &[T]) -> Case {
        self.compared(field, values, Compare::Exact)
    }

    /// Puts memory behind a pointer, with a comparison of its own.
    pub fn compared<T: Pod>(mut self, field: &'static str, values: &[T], compare: Compare) -> Case {
        let described = self.kernel.args.field(field).unwrap_or_else(|| panic!("{} has no {field}", self.name));
        let capstan::kernels::FieldKind::Pointer { dtype, .. } = described.kind else { panic!("{field} is no pointer") };
        let (need, have) = (described.extent_bytes(&self.args), size_of_val(values) as u64);
        assert!(need <= have, "{}.{field}: {have} bytes of {need}", self.name);
        self.buffers.push(Buffer { field, dtype: dtype(&self.args), bytes: cast_slice(values).to_vec(), compare });
        self
    }

    /// Puts undefined memory of the declared extent behind a pointer: the same garbage for every executor.
    pub fn undefined(self, field: &'static str, compare: Compare) -> Case {
        let bytes = self.kernel.args.field(field).map_or(0, |described| described.extent_bytes(&self.args)) as usize;
        self.compared(field, &vec![0xa5u8; bytes], compare)
    }

    /// Gives the launch LDS.
    pub fn lds(mut self, bytes: u32) -> Case {
        self.shape.lds_bytes = bytes;
        self
    }

    /// The argument struct with addresses for the buffers, in their order.
    pub fn args_at(&self, addresses: &[u64]) -> Vec<u8> {
        let mut args = self.args.clone();
        for (buffer, &address) in self.buffers.iter().zip(addresses) {
            let field = self.kernel.args.field(buffer.field).expect("checked when it was added");
            field.set_pointer(&mut args, Ptr(address));
        }
        for field in self.kernel.args.pointers() {
            let given = self.buffers.iter().any(|buffer| buffer.field == field.name);
            assert!(given || field.extent_bytes(&self.args) == 0, "{}: nothing behind {}", self.name, field.name);
        }
        args
    }

    /// Compares what two executors left.
    pub fn check(&self, expected: &[Vec<u8>], found: &[Vec<u8>], who: &str) {
        for ((buffer, expected), found) in self.buffers.iter().zip(expected).zip(found) {
            let differing = differences(buffer, expected, found);
            assert!(differing.is_empty(), "{} on {who}: {} differs: {}", self.name, buffer.field, differing.join(", "));
        }
    }
}

/// The first few elements that differ.
fn differences(buffer: &Buffer, expected: &[u8], found: &[u8]) -> Vec<String> {
    assert_eq!(expected.len(), found.len());
    let size = buffer.dtype.bytes() as usize;
    let elements = expected.chunks(size).zip(found.chunks(size)).enumerate();
    let differing = elements.filter(|(_, (expected, found))| expected != found).filter_map(|(at, (expected, found))| {
        let (Some(a), Some(b)) = (float(buffer.dtype, expected), float(buffer.dtype, found)) else {
            return Some(format!("[{at}] {expected:x?} became {found:x?}"));
        };
        let same = match buffer.compare {
            _ if a.is_nan() || b.is_nan() => a.is_nan() && b.is_nan(),
            Compare::Exact => false,
            Compare::Close { abs, rel } => a == b || (a - b).abs() <= abs + rel * a.abs(),
        };
        (!same).then(|| format!("[{at}] {a:?} became {b:?}"))
    });
    differing.take(6).collect()
}

fn float(dtype: DType, bytes: &[u8]) -> Option<f32> {
    match dtype {
        DType::F32 => Some(bytemuck::pod_read_unaligned(bytes)),
        DType::Bf16 => Some(bytemuck::pod_read_unaligned::<bf16>(bytes).to_f32()),
        DType::F8E4M3 => Some(F8E4M3(bytes[0]).to_f32()),
        _ => None,
    }
}

/// What the builders draw from.
pub struct Draw(pub Random);

impl Draw {
    /// Seeded by `CAPSTAN_SEED` or the clock; prints the seed under the test's name.
    pub fn seeded(test: &str) -> Draw {
        let clock = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_nanos() as u64;
        let seed = std::env::var("CAPSTAN_SEED").ok().map_or_else(clock, |seed| seed.parse().expect("CAPSTAN_SEED is a u64"));
        eprintln!("{test}: CAPSTAN_SEED={seed}");
        Draw(Random::new(seed))
    }

    /// In low..=high.
    pub fn between(&mut self, low: u32, high: u32) -> u32 {
        low + (self.0.next_u64() % u64::from(high - low + 1)) as u32
    }

    pub fn chance(&mut self, one_in: u32) -> bool {
        self.between(1, one_in) == 1
    }

    pub fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.between(0, all.len() as u32 - 1) as usize]
    }

    pub fn normal(&mut self) -> f32 {
        self.0.normal() as f32
    }

    pub fn floats(&mut self, count: u32) -> Vec<f32> {
        (0..count).map(|_| self.normal()).collect()
    }

    /// Normal values of a cache or weight type.
    pub fn cells(&mut self, dtype: DType, count: u32, scale: f32) -> Vec<u8> {
        let values: Vec<f32> = (0..count).map(|_| self.normal() * scale).collect();
        match dtype {
            DType::F32 => cast_slice(&values).to_vec(),
            DType::Bf16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
            DType::F8E4M3 => values.iter().map(|&x| F8E4M3::from_f32(x).0).collect(),
            other => panic!("no cell is a {other}"),
        }
    }

    /// Causal lengths up to `most`, every third or so a pad.
    pub fn lens(&mut self, rows: u32, most: u32) -> Vec<i32> {
        (0..rows).map(|_| if self.chance(3) { 0 } else { self.between(1, most) as i32 }).collect()
    }

    /// `0..count` in random order.
    pub fn permutation(&mut self, count: u32) -> Vec<i32> {
        let mut all: Vec<i32> = (0..count as i32).collect();
        for i in (1..all.len()).rev() {
            all.swap(i, self.between(0, i as u32) as usize);
        }
        all
    }
}

/// Every kernel on some random shapes: a round. Rounds of higher numbers draw other shapes, not larger ones.
pub fn cases(draw: &mut Draw) -> Vec<Case> {
    let mut all = step::cases(draw);
    all.extend(attention::cases(draw));
    all.extend(model::cases(draw));
    all.extend(exchange::cases(draw));
    let every = capstan::kernels::registry::all().iter().chain(capstan::kernels::registry::peers());
    let missing: Vec<&str> =
        every.filter(|kernel| !all.iter().any(|case| case.kernel.symbol == kernel.symbol)).map(|kernel| kernel.symbol).collect();
    assert!(missing.is_empty(), "no case launches {missing:?}");
    // CAPSTAN_KERNEL=attend: only kernels whose symbol has that in it.
    if let Ok(part) = std::env::var("CAPSTAN_KERNEL") {
        all.retain(|case| case.kernel.symbol.contains(&part));
    }
    all
}

/// Rounds of [`cases`] that a test runs: `CAPSTAN_ROUNDS`, else one.
pub fn rounds() -> u32 {
    std::env::var("CAPSTAN_ROUNDS").ok().map_or(1, |rounds| rounds.parse().expect("CAPSTAN_ROUNDS is a number"))
}
