//! One suite for every device: what `capstan::hal` promises, held on `cpu`, `null`, both under `checked`, and GPUs where there
//! are any. Devices that are not there are skipped by name.
#![expect(unsafe_code, reason = "drives devices by their raw calls, over memory it holds")]

use std::sync::Arc;

use bytemuck::bytes_of;
use capstan::capture::Modules;
use capstan::hal::checked::CheckedDevice;
use capstan::hal::{self, *};
use capstan::kernels::Ptr;
use capstan::kernels::probe::ProbeArgs;
use capstan::kernels::registry::PROBE;

/// Words of each test buffer.
const COUNT: u32 = 1000;
const BYTES: u64 = COUNT as u64 * 4;

fn devices() -> Vec<(String, Arc<dyn Device>)> {
    let mut found = Vec::new();
    for name in ["cpu", "null", "cuda", "hip"] {
        match hal::open(name) {
            Ok(device) => {
                found.push((format!("checked {name}"), CheckedDevice::wrap(device.clone()) as Arc<dyn Device>));
                found.push((name.to_string(), device));
            }
            Err(error) => println!("skipped: {name}: {}", error.message()),
        }
    }
    found
}

/// Runs a case on every device; `executing` leaves out those that run nothing, a gap their name says.
fn each(executing: bool, case: impl Fn(&Rig)) {
    for (name, device) in devices() {
        if executing && !device.info().executes {
            continue;
        }
        println!("on {name}");
        let checked = device.clone();
        case(&Rig::new(device));
        if let Some(checked) = checked.as_any().downcast_ref::<CheckedDevice>() {
            assert_eq!(checked.alive(), Default::default(), "{name}: something leaked");
        }
    }
}

/// A device with two buffers and the probe kernel.
struct Rig {
    device: Arc<dyn Device>,
    stream: Arc<dyn Stream>,
    // Keeps the kernel loaded.
    _modules: Modules,
    probe: FunctionHandle,
    a: Allocation,
    b: Allocation,
}

impl Rig {
    fn new(device: Arc<dyn Device>) -> Rig {
        let modules = Modules::load(&*device, &[&PROBE]).unwrap();
        let probe = modules.function(&PROBE).unwrap();
        let [a, b] = [(); 2].map(|()| device.allocate(MemoryKind::Device, BYTES).unwrap());
        Rig { stream: device.create_stream().unwrap(), _modules: modules, probe, a, b, device }
    }

    fn args(&self, dst: &Allocation, src: &Allocation, mul: u32, add: u32) -> ProbeArgs {
        ProbeArgs { dst: Ptr(dst.ptr.0), src: Ptr(src.ptr.0), count: COUNT, mul, add, reserved: 0 }
    }

    fn shape() -> LaunchShape {
        LaunchShape { grid: [COUNT.div_ceil(256), 1, 1], workgroup: [256, 1, 1], lds_bytes: 0 }
    }

    fn launch_on(&self, stream: &dyn Stream, args: &ProbeArgs) {
        // SAFETY: both buffers hold COUNT words and live as long as the rig; one stream, or events, order the launches.
        unsafe { stream.launch(self.probe, &Rig::shape(), bytes_of(args)) }.unwrap();
    }

    fn launch(&self, args: &ProbeArgs) {
        self.launch_on(&*self.stream, args);
    }

    fn replay(&self, exec: &dyn GraphExec) {
        // SAFETY: the graph points at the rig's buffers and kernel, which are alive.
        unsafe { self.stream.launch_graph(exec) }.unwrap();
    }

    fn write(&self, to: &Allocation, value: u32) {
        let words = vec![value; COUNT as usize];
        // SAFETY: the buffer holds COUNT words.
        unsafe { self.stream.write(to.ptr, bytemuck::cast_slice(&words)) }.unwrap();
    }

    fn read(&self, from: &Allocation) -> u32 {
        let mut words = vec![0u32; COUNT as usize];
        // SAFETY: the buffer holds COUNT words.
        unsafe { self.stream.read(from.ptr, bytemuck::cast_slice_mut(&mut words)) }.unwrap();
        assert!(words.iter().all(|&word| word == words[0]), "all words went through the same maps");
        words[0]
    }

    /// Records `body` and gives the graph.
    fn capture(&self, body: impl FnOnce()) -> Arc<dyn Graph> {
        self.stream.begin_capture(CaptureMode::ThreadLocal).unwrap();
        body();
        self.stream.end_capture().unwrap()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.device.synchronize().unwrap();
        for allocation in [self.a, self.b] {
            // SAFETY: nothing queued or recorded uses it any more.
            unsafe { self.device.free(allocation) }.unwrap();
        }
    }
}

#[test]
fn memory_of_every_kind() {
    each(false, |rig| {
        for kind in [MemoryKind::Device, MemoryKind::Peer, MemoryKind::Pinned] {
            let before = rig.device.memory().unwrap();
            let allocation = rig.device.allocate(kind, 10_000).unwrap();
            assert_eq!((allocation.kind, allocation.bytes), (kind, 10_000));
            assert!(allocation.ptr.0.is_multiple_of(if kind == MemoryKind::Peer { 4096 } else { 256 }));
            assert!(allocation.host != 0 || kind != MemoryKind::Pinned, "the host sees pinned memory");
            assert!(before.free_bytes <= before.total_bytes);
            // SAFETY: nothing uses it.
            unsafe { rig.device.free(allocation) }.unwrap();
        }
        assert!(rig.device.allocate(MemoryKind::Device, 0).is_err());
        assert!(rig.device.allocate(MemoryKind::Device, u64::MAX / 2).is_err(), "more than there is");
    });
}

#[test]
fn a_stream_runs_in_order() {
    each(true, |rig| {
        rig.write(&rig.a, 3);
        rig.launch(&rig.args(&rig.b, &rig.a, 5, 1));
        rig.launch(&rig.args(&rig.b, &rig.b, 7, 2));
        // SAFETY: both buffers hold BYTES.
        unsafe { rig.stream.copy(rig.a.ptr, rig.b.ptr, BYTES) }.unwrap();
        // SAFETY: as above.
        unsafe { rig.stream.fill(rig.b.ptr, 0xab, BYTES) }.unwrap();
        assert_eq!((rig.read(&rig.a), rig.read(&rig.b)), (16 * 7 + 2, 0xabab_abab));
        assert!(rig.stream.query().unwrap());
    });
}

#[test]
fn events_order_streams_and_tell_time() {
    each(true, |rig| {
        let other = rig.device.create_stream().unwrap();
        let [start, end] = [(); 2].map(|()| rig.device.create_event(true).unwrap());
        rig.write(&rig.a, 1);
        rig.stream.record(&*start).unwrap();
        for _ in 0..200 {
            rig.launch(&rig.args(&rig.a, &rig.a, 3, 1));
        }
        rig.stream.record(&*end).unwrap();
        other.wait(&*end).unwrap();
        rig.launch_on(&*other, &rig.args(&rig.b, &rig.a, 1, 0));
        other.synchronize().unwrap();
        let expected = (0..200).fold(1u32, |x, _| x.wrapping_mul(3).wrapping_add(1));
        assert_eq!(rig.read(&rig.b), expected);
        assert!(end.query().unwrap() && end.seconds_since(&*start).unwrap() >= 0.0);
    });
}

#[test]
fn capture_records_by_value_and_runs_nothing() {
    each(false, |rig| {
        rig.write(&rig.a, 2);
        rig.write(&rig.b, 9);
        let mut args = rig.args(&rig.b, &rig.a, 10, 4);
        let graph = rig.capture(|| {
            assert_eq!(rig.stream.capture_status().unwrap(), CaptureStatus::Active);
            rig.launch(&args);
            // What the host does with its copy afterwards changes nothing.
            args.mul = 1000;
        });
        assert_eq!(rig.stream.capture_status().unwrap(), CaptureStatus::None);
        let Node::Kernel(node) = graph.node(NodeId(0)).unwrap() else { panic!("a launch is a kernel node") };
        assert_eq!(node.args, bytes_of(&rig.args(&rig.b, &rig.a, 10, 4)));
        assert_eq!((node.symbol.as_str(), node.function, node.shape), (PROBE.symbol, rig.probe, Rig::shape()));
        let exec = graph.instantiate().unwrap();
        drop(graph);
        exec.upload(&*rig.stream).unwrap();
        if !rig.device.info().executes {
            return;
        }
        assert_eq!(rig.read(&rig.b), 9, "a capture runs nothing");
        for value in [2, 5] {
            rig.write(&rig.a, value);
            rig.replay(&*exec);
            assert_eq!(rig.read(&rig.b), value * 10 + 4, "a replay reads what is there now");
        }
    });
}

#[test]
fn nodes_and_edges_of_a_straight_line() {
    each(false, |rig| {
        let graph = rig.capture(|| {
            rig.launch(&rig.args(&rig.b, &rig.a, 3, 1));
            // SAFETY: both buffers hold BYTES.
            unsafe { rig.stream.copy(rig.a.ptr, rig.b.ptr, BYTES) }.unwrap();
            // SAFETY: as above.
            unsafe { rig.stream.fill(rig.b.ptr, 7, BYTES) }.unwrap();
        });
        assert_eq!(graph.node_count().unwrap(), 3);
        assert!(matches!(graph.node(NodeId(0)).unwrap(), Node::Kernel(_)));
        assert_eq!(graph.node(NodeId(1)).unwrap(), Node::Copy { dst: rig.a.ptr, src: rig.b.ptr, bytes: BYTES });
        assert_eq!(graph.node(NodeId(2)).unwrap(), Node::Fill { dst: rig.b.ptr, byte: 7, bytes: BYTES });
        assert_eq!(graph.edges().unwrap(), [(NodeId(0), NodeId(1)), (NodeId(1), NodeId(2))]);
        assert!(graph.node(NodeId(3)).is_err());
    });
}

#[test]
fn branches_join() {
    each(false, |rig| {
        let side = rig.device.create_stream().unwrap();
        let [fork, join] = [(); 2].map(|()| rig.device.create_event(false).unwrap());
        let third = rig.device.allocate(MemoryKind::Device, BYTES).unwrap();
        let graph = rig.capture(|| {
            rig.launch(&rig.args(&rig.a, &rig.a, 3, 0));
            rig.stream.record(&*fork).unwrap();
            side.wait(&*fork).unwrap();
            rig.launch_on(&*side, &rig.args(&rig.b, &rig.a, 5, 0));
            side.record(&*join).unwrap();
            rig.launch(&rig.args(&third, &rig.a, 7, 0));
            rig.stream.wait(&*join).unwrap();
            rig.launch(&rig.args(&rig.b, &rig.b, 1, 1));
        });
        let exec = graph.instantiate().unwrap();
        if rig.device.info().executes {
            rig.write(&rig.a, 2);
            rig.replay(&*exec);
            assert_eq!((rig.read(&rig.b), rig.read(&third)), (31, 42));
        }
        drop((exec, graph));
        // SAFETY: the graph is gone and the reads above waited for the stream.
        unsafe { rig.device.free(third) }.unwrap();
    });
}

#[test]
fn a_fork_that_does_not_join_is_an_error() {
    each(false, |rig| {
        let (side, fork) = (rig.device.create_stream().unwrap(), rig.device.create_event(false).unwrap());
        rig.stream.begin_capture(CaptureMode::ThreadLocal).unwrap();
        rig.stream.record(&*fork).unwrap();
        side.wait(&*fork).unwrap();
        rig.launch_on(&*side, &rig.args(&rig.b, &rig.a, 5, 0));
        assert!(rig.stream.end_capture().is_err());
        assert_eq!(rig.stream.capture_status().unwrap(), CaptureStatus::None);
    });
}

#[test]
fn calls_that_a_capture_forbids_fail_and_the_device_goes_on() {
    each(false, |rig| {
        rig.stream.begin_capture(CaptureMode::ThreadLocal).unwrap();
        rig.launch(&rig.args(&rig.b, &rig.a, 5, 0));
        let error = rig.stream.synchronize().unwrap_err();
        assert!(error.message().contains("synchronize"), "{error}");
        assert!(rig.stream.begin_capture(CaptureMode::ThreadLocal).is_err(), "a stream records one graph at a time");
        // Invalidated or not, ending it leaves a stream that runs.
        drop(rig.stream.end_capture());
        assert!(rig.stream.end_capture().is_err(), "no capture is open");
        rig.write(&rig.a, 4);
        rig.launch(&rig.args(&rig.b, &rig.a, 2, 0));
        rig.stream.synchronize().unwrap();
        if rig.device.info().executes {
            assert_eq!(rig.read(&rig.b), 8);
        }
    });
}

#[test]
fn two_graphs_alternate_and_large_ones_run_whole() {
    each(true, |rig| {
        let [twice, plus] = [(2, 0), (1, 1)]
            .map(|(mul, add)| rig.capture(|| rig.launch(&rig.args(&rig.a, &rig.a, mul, add))).instantiate().unwrap());
        let large = rig.capture(|| (0..1000).for_each(|at| rig.launch(&rig.args(&rig.a, &rig.a, 3, at))));
        assert_eq!((large.node_count().unwrap(), large.edges().unwrap().len()), (1000, 999));
        let large = large.instantiate().unwrap();
        rig.write(&rig.a, 1);
        let mut expected = 1u32;
        for _ in 0..20 {
            rig.replay(&*twice);
            rig.replay(&*plus);
            expected = expected.wrapping_mul(2).wrapping_add(1);
        }
        rig.replay(&*large);
        expected = (0..1000u32).fold(expected, |x, at| x.wrapping_mul(3).wrapping_add(at));
        assert_eq!(rig.read(&rig.a), expected);
    });
}

#[test]
fn pinned_memory_is_seen_by_both_sides() {
    each(true, |rig| {
        let pinned = rig.device.allocate(MemoryKind::Pinned, BYTES).unwrap();
        // SAFETY: the host address of COUNT words that nothing on the device uses yet.
        let words = unsafe { std::slice::from_raw_parts_mut(pinned.host as *mut u32, COUNT as usize) };
        words.fill(6);
        rig.launch(&rig.args(&rig.a, &pinned, 3, 0));
        rig.launch(&rig.args(&pinned, &rig.a, 1, 1));
        rig.stream.synchronize().unwrap();
        // SAFETY: the stream is idle.
        let seen = unsafe { std::ptr::read_volatile(pinned.host as *const u32) };
        assert_eq!(seen, 19);
        // SAFETY: nothing uses it any more.
        unsafe { rig.device.free(pinned) }.unwrap();
    });
}

#[test]
fn a_kernel_that_is_not_there_is_named() {
    each(false, |rig| {
        let module = Modules::load(&*rig.device, &[&PROBE]).unwrap();
        drop(module);
        let error = Modules::load(&*rig.device, &[&PROBE, &PROBE]).unwrap_err();
        assert!(error.message().contains(PROBE.symbol), "{error}");
    });
}
