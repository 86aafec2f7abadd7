//! Every kernel on the device that `CAPSTAN_DEVICE` names (cuda, hip) leaves what the CPU op leaves, launched eagerly and replayed
//! from a captured graph; bit for bit, but for matrix instructions.
//!
//! Skips by name without that variable. `CAPSTAN_SEED` repeats a run, `CAPSTAN_ROUNDS` asks for more of them.

#![expect(unsafe_code, reason = "launches kernels on memory of the test")]

mod kernels;

use std::collections::HashMap;
use std::sync::Arc;

use capstan::hal::{Allocation, CaptureMode, Device, MemoryKind, Module, ModuleImage, Stream, open};
use capstan::kernels::build;
use kernels::ops::run_op;
use kernels::{Case, Draw, cases, rounds};

struct Gpu {
    device: Arc<dyn Device>,
    stream: Arc<dyn Stream>,
    modules: HashMap<&'static str, Arc<dyn Module>>,
}

impl Gpu {
    fn open(name: &str) -> Gpu {
        let device = open(name).unwrap_or_else(|error| panic!("{error}"));
        let names: Vec<&'static str> = build::sources().map(|source| source.name).collect();
        let objects = build::load(&device.info().arch, &names).unwrap_or_else(|error| panic!("{error}"));
        let modules = names.into_iter().zip(objects).map(|(name, object)| {
            let module = device.load_module(ModuleImage::Object(&object.bytes)).unwrap_or_else(|error| panic!("{name}: {error}"));
            (name, module)
        });
        let modules = modules.collect();
        let stream = device.create_stream().expect("a stream");
        Gpu { device, stream, modules }
    }

    /// What a case leaves, launched eagerly and then replayed from a graph of one node.
    fn run(&self, case: &Case) -> [Vec<Vec<u8>>; 2] {
        let memory: Vec<Allocation> = case
            .buffers
            .iter()
            .map(|buffer| {
                let kind = if ["ring", "results"].contains(&buffer.field) { MemoryKind::Pinned } else { MemoryKind::Device };
                self.device.allocate(kind, buffer.bytes.len().max(1) as u64).expect("memory for a case")
            })
            .collect();
        let args = case.args_at(&memory.iter().map(|allocation| allocation.ptr.0).collect::<Vec<_>>());
        let module = &self.modules[case.kernel.source];
        let function = module.function(case.kernel.symbol, case.kernel.args.bytes).unwrap_or_else(|error| panic!("{error}"));
        let launch = || {
            // SAFETY: the arguments point to allocations of the declared extents, used by this stream alone.
            unsafe { self.stream.launch(function, &case.shape, &args) }.unwrap_or_else(|error| panic!("{}: {error}", case.name));
        };
        self.fill(case, &memory);
        launch();
        let eager = self.read(case, &memory);
        self.fill(case, &memory);
        self.stream.begin_capture(CaptureMode::ThreadLocal).expect("a capture");
        launch();
        let graph = self.stream.end_capture().expect("a graph");
        let exec = graph.instantiate().expect("a graph that can run");
        // SAFETY: memory and module live until the read below has waited for the replay.
        unsafe { self.stream.launch_graph(&*exec) }.expect("a replay");
        let replayed = self.read(case, &memory);
        for allocation in memory {
            // SAFETY: the stream has finished (`read` waits), and the graph is replayed no more.
            unsafe { self.device.free(allocation) }.expect("frees");
        }
        [eager, replayed]
    }

    fn fill(&self, case: &Case, memory: &[Allocation]) {
        for (buffer, allocation) in case.buffers.iter().zip(memory) {
            // SAFETY: the allocation has the buffer's size.
            unsafe { self.stream.write(allocation.ptr, &buffer.bytes) }.unwrap_or_else(|error| panic!("{}: {error}", case.name));
        }
    }

    fn read(&self, case: &Case, memory: &[Allocation]) -> Vec<Vec<u8>> {
        let buffers = case.buffers.iter().zip(memory);
        buffers
            .map(|(buffer, allocation)| {
                let mut bytes = vec![0; buffer.bytes.len()];
                // SAFETY: the allocation has the buffer's size.
                unsafe { self.stream.read(allocation.ptr, &mut bytes) }.unwrap_or_else(|error| panic!("{}: {error}", case.name));
                bytes
            })
            .collect()
    }
}

#[test]
fn a_gpu_gives_the_cpu_ops_results() {
    let Some(name) = std::env::var("CAPSTAN_DEVICE").ok().filter(|name| !["", "cpu", "null"].contains(&name.as_str())) else {
        eprintln!("skipped: CAPSTAN_DEVICE names no GPU");
        return;
    };
    let gpu = Gpu::open(&name);
    let mut draw = Draw::seeded(&format!("kernels on {name}"));
    for _ in 0..rounds() {
        for case in cases(&mut draw) {
            let expected = run_op(&case);
            let [eager, replayed] = gpu.run(&case);
            case.check(&expected, &eager, &format!("{name}, eager"));
            assert!(eager == replayed, "{}: a replay differs from the eager launch", case.name);
        }
    }
}
