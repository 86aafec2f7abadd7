//! What only the CPU device promises: panics, limits, replay orders, parallel launches.

use super::*;
use crate::hal::{CaptureMode, CpuKernel, DevicePtr, LaunchShape, Workgroup};

/// dst [workgroups] u32: each workgroup writes its linear index plus `base`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct IndexArgs {
    dst: u64,
    base: u64,
}

unsafe fn index(args: &[u8], workgroup: &mut Workgroup<'_>) {
    let args: IndexArgs = bytemuck::pod_read_unaligned(args);
    let [x, y, z] = workgroup.id;
    let [gx, gy, _] = workgroup.shape.grid;
    let at = x + gx * (y + gy * z);
    let dst = std::ptr::with_exposed_provenance_mut::<u32>(args.dst as usize);
    // SAFETY: the test allocated one element a workgroup, and each writes its own.
    unsafe { dst.add(at as usize).write(at + args.base as u32) };
}

unsafe fn broken(_: &[u8], workgroup: &mut Workgroup<'_>) {
    assert!(workgroup.id[0] != 7, "workgroup 7 is broken");
}

const KERNELS: &[CpuKernel] =
    &[CpuKernel { symbol: "index", args_bytes: 16, op: index }, CpuKernel { symbol: "broken", args_bytes: 0, op: broken }];

fn grid(x: u32, y: u32, z: u32) -> LaunchShape {
    LaunchShape { grid: [x, y, z], workgroup: [1, 1, 1], lds_bytes: 64 }
}

fn read_u32(stream: &dyn Stream, at: DevicePtr, count: usize) -> Vec<u32> {
    let mut bytes = vec![0u8; count * 4];
    // SAFETY: callers ask for what they allocated.
    unsafe { stream.read(at, &mut bytes) }.unwrap();
    bytemuck::pod_collect_to_vec(&bytes)
}

#[test]
fn every_workgroup_runs_once_on_any_number_of_threads() {
    for threads in [1, 2, 5] {
        let device = CpuDevice::new(threads).unwrap();
        let module = device.load_module(ModuleImage::Ops(KERNELS)).unwrap();
        let function = module.function("index", 16).unwrap();
        let stream = device.create_stream().unwrap();
        let memory = device.allocate(MemoryKind::Device, 4 * 13 * 7 * 3).unwrap();
        for round in 0..200u32 {
            let args = IndexArgs { dst: memory.ptr.0, base: u64::from(round) };
            // SAFETY: `memory` holds one element a workgroup.
            unsafe { stream.launch(function, &grid(13, 7, 3), bytemuck::bytes_of(&args)) }.unwrap();
            let expected: Vec<u32> = (0..13 * 7 * 3).map(|at| at + round).collect();
            assert_eq!(read_u32(&*stream, memory.ptr, expected.len()), expected, "{threads} threads, round {round}");
        }
    }
}

#[test]
fn panic_fails_the_stream_and_names_the_kernel() {
    let device = CpuDevice::new(3).unwrap();
    let module = device.load_module(ModuleImage::Ops(KERNELS)).unwrap();
    let function = module.function("broken", 0).unwrap();
    let stream = device.create_stream().unwrap();
    // SAFETY: the op touches nothing.
    unsafe { stream.launch(function, &grid(64, 1, 1), &[]) }.unwrap();
    let event = device.create_event(false).unwrap();
    for error in [stream.synchronize().unwrap_err(), device.synchronize().unwrap_err(), stream.query().unwrap_err()] {
        assert_eq!(error.kind(), crate::error::ErrorKind::Device);
        assert!(error.message().contains("kernel broken panicked: workgroup 7 is broken"), "{error}");
    }
    assert!(stream.record(&*event).is_err());
    let other = device.create_stream().unwrap();
    // SAFETY: seven workgroups, the eighth is the broken one.
    unsafe { other.launch(function, &grid(7, 1, 1), &[]) }.unwrap();
    other.synchronize().unwrap();
}

#[test]
fn memory_has_a_limit_and_counts() {
    let device = CpuDevice::new(1).unwrap();
    device.set_memory_limit(10_000);
    let first = device.allocate(MemoryKind::Device, 6_000).unwrap();
    let error = device.allocate(MemoryKind::Peer, 6_000).unwrap_err();
    assert!(error.message().contains("4000 bytes are free"), "{error}");
    assert_eq!((device.allocation_count(), device.memory().unwrap().free_bytes), (1, 4_000));
    // SAFETY: nothing was queued.
    unsafe { device.free(first) }.unwrap();
    // SAFETY: refused.
    let error = unsafe { device.free(first) }.unwrap_err();
    assert!(error.message().contains("no allocation"), "{error}");
    assert_eq!((device.allocation_count(), device.memory().unwrap().free_bytes), (0, 10_000));
}

#[test]
fn a_replay_seed_shows_a_missing_edge() {
    let device = CpuDevice::new(1).unwrap();
    let module = device.load_module(ModuleImage::Ops(KERNELS)).unwrap();
    let function = module.function("index", 16).unwrap();
    let [a, b] = [(); 2].map(|()| device.create_stream().unwrap());
    let (forked, joined) = (device.create_event(false).unwrap(), device.create_event(false).unwrap());
    let memory = device.allocate(MemoryKind::Device, 4).unwrap();
    let launch = |stream: &dyn Stream, base| {
        let args = IndexArgs { dst: memory.ptr.0, base };
        // SAFETY: one workgroup, one element; the race is what is tested, on a device with one thread.
        unsafe { stream.launch(function, &grid(1, 1, 1), bytemuck::bytes_of(&args)) }.unwrap();
    };
    a.begin_capture(CaptureMode::Global).unwrap();
    a.record(&*forked).unwrap();
    b.wait(&*forked).unwrap();
    launch(&*a, 1);
    launch(&*b, 2);
    b.record(&*joined).unwrap();
    a.wait(&*joined).unwrap();
    let graph = a.end_capture().unwrap();
    let mut results = std::collections::BTreeSet::new();
    for seed in 0..16 {
        device.set_replay_seed(Some(seed));
        let exec = graph.instantiate().unwrap();
        // SAFETY: memory and module are alive.
        unsafe { a.launch_graph(&*exec) }.unwrap();
        results.insert(read_u32(&*a, memory.ptr, 1)[0]);
    }
    assert_eq!(results.into_iter().collect::<Vec<_>>(), [1, 2], "both orders were seen");
}
