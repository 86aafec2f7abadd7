//! Faults inside the capture window: calls that a capture forbids, slipped in between two launches of the chain.

use std::sync::Arc;

use capstan::Result;
use capstan::arena::{Arena, BufferId};
use capstan::capture::{Modules, launch_all, lower, record};
use capstan::hal::{CaptureMode, Device, MemoryKind, ModuleImage};
use capstan::kernels::registry::PROBE;

use super::liar::{Lies, Window};
use super::rig::{Fault, Rig, msa};

/// Captures while `call` is made in the window.
fn capture_with(call: impl Fn(&Window<'_>) + Send + Sync + 'static) -> Result<()> {
    let mut rig = Rig::new(msa())?;
    rig.liar.lie(Lies { window: Some(Arc::new(call)), ..Lies::default() });
    rig.executor.capture(|_| ()).map(drop)
}

/// An address of the plan that a call in the window may touch.
fn scratch(window: &Window<'_>) -> capstan::hal::DevicePtr {
    // Allocated on another thread: a thread-local capture does not forbid that.
    std::thread::scope(|scope| scope.spawn(|| window.device.allocate(MemoryKind::Device, 4096).unwrap()).join().unwrap().ptr)
}

pub static FAULTS: &[Fault] = &[
    Fault {
        name: "a fill queued in the window",
        caught_by: "CAP-1",
        names: &["msa.decode: node 2 is a fill of 64 bytes"],
        run: || {
            capture_with(|window| {
                // SAFETY: a fresh allocation of 4096 bytes that nothing else uses (ADDR-1).
                unsafe { window.stream.fill(scratch(window), 0, 64) }.unwrap();
            })
        },
    },
    Fault {
        name: "a copy queued in the window",
        caught_by: "CAP-1",
        names: &["msa.decode: node 2 is a copy of 64 bytes"],
        run: || {
            capture_with(|window| {
                let at = scratch(window);
                // SAFETY: a fresh allocation of 4096 bytes that nothing else uses (ADDR-1).
                unsafe { window.stream.copy(at, at.add(2048), 64) }.unwrap();
            })
        },
    },
    Fault {
        name: "a host synchronisation in the window",
        caught_by: "CAP-1",
        names: &["capture mode=ThreadLocal", "at layer0.norm_rope_insert", "synchronize"],
        run: || capture_with(|window| drop(window.stream.synchronize())),
    },
    Fault {
        name: "a wait for the whole device in the window",
        caught_by: "CAP-1",
        names: &["at layer0.norm_rope_insert", "device synchronize"],
        run: || capture_with(|window| drop(window.device.synchronize())),
    },
    Fault {
        name: "a stream query in the window",
        caught_by: "CAP-1",
        names: &["at layer0.norm_rope_insert", "query"],
        run: || capture_with(|window| drop(window.stream.query())),
    },
    Fault {
        name: "a read by the host in the window",
        caught_by: "CAP-1",
        names: &["at layer0.norm_rope_insert", "read"],
        run: || {
            capture_with(|window| {
                let mut bytes = [0; 64];
                // SAFETY: a fresh allocation of 4096 bytes that nothing else uses (ADDR-1).
                drop(unsafe { window.stream.read(scratch(window), &mut bytes) });
            })
        },
    },
    Fault {
        name: "an allocation in the window",
        caught_by: "CAP-1",
        names: &["at layer0.norm_rope_insert", "allocate"],
        run: || capture_with(|window| drop(window.device.allocate(MemoryKind::Device, 4096))),
    },
    Fault {
        name: "a module loaded in the window",
        caught_by: "CAP-1",
        names: &["at layer0.norm_rope_insert", "load_module"],
        run: || capture_with(|window| drop(window.device.load_module(ModuleImage::Ops(&[PROBE.cpu_kernel()])))),
    },
    Fault {
        name: "a foreign stream that joined and was not joined back",
        caught_by: "CAP-1",
        names: &["at the end of the chain", "not joined back"],
        run: || {
            capture_with(|window| {
                let foreign = window.device.create_stream().unwrap();
                let event = window.device.create_event(false).unwrap();
                window.stream.record(&*event).unwrap();
                foreign.wait(&*event).unwrap();
                // SAFETY: a fresh allocation of 4096 bytes that nothing else uses (ADDR-1).
                unsafe { foreign.fill(scratch(window), 0, 64) }.unwrap();
                std::mem::forget(foreign);
            })
        },
    },
    Fault {
        name: "the window waits for a foreign stream's event",
        caught_by: "CAP-1",
        names: &["at layer0.norm_rope_insert", "wait"],
        run: || {
            capture_with(|window| {
                let (foreign, event) = (window.device.create_stream().unwrap(), window.device.create_event(false).unwrap());
                foreign.record(&*event).unwrap();
                drop(window.stream.wait(&*event));
            })
        },
    },
    Fault {
        name: "a capture inside a capture",
        caught_by: "state",
        names: &["already capturing"],
        run: || {
            let rig = Rig::new(msa())?;
            let stream = rig.liar.create_stream()?;
            stream.begin_capture(CaptureMode::ThreadLocal)?;
            let (arena, chain) = (rig.executor.arena(), msa().decode(&rig.executor.eager_key(1, 1)));
            let modules = std::thread::scope(|scope| scope.spawn(|| Modules::load(&rig.liar, &msa().kernels())).join().unwrap())?;
            let launches = lower(&chain, arena, &modules)?;
            let nested = record(&rig.liar, &*stream, &chain, &launches).map(drop);
            // The refused capture left the open one alone.
            launch_all(&*stream, &chain, &launches)?;
            assert_eq!(stream.end_capture()?.node_count()?, chain.ops.len());
            nested
        },
    },
    Fault {
        name: "a second arena allocated in the window",
        caught_by: "CAP-1",
        names: &["at layer0.norm_rope_insert", "allocate"],
        run: || {
            let plan = msa().plan().clone();
            capture_with(move |window| {
                // A second arena in the middle of a capture: SEAL-1 leaves no other way to allocate.
                let second = Arena::allocate(window.device, plan.clone()).and_then(Arena::seal);
                drop(second.map(|arena| arena.ptr(BufferId(0))));
            })
        },
    },
];
