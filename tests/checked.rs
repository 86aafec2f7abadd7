//! The checked device refuses what breaks a contract, at the call that breaks it; the fault device fails any call and nothing
//! leaks.
#![expect(unsafe_code, reason = "breaks the contracts of raw calls on purpose; the checked device stops them")]

mod serving;

use std::sync::Arc;

use bytemuck::bytes_of;
use capstan::capture::Modules;
use capstan::error::ErrorKind;
use capstan::hal::checked::{Alive, CheckedDevice};
use capstan::hal::fault::{Fault, FaultDevice};
use capstan::hal::{self, *};
use capstan::kernels::Ptr;
use capstan::kernels::probe::ProbeArgs;
use capstan::kernels::registry::PROBE;
use capstan::runtime::{Executor, Sampling, SequenceStep};
use capstan::{Error, Result};

fn checked() -> Arc<CheckedDevice> {
    CheckedDevice::wrap(hal::open("cpu").unwrap())
}

fn refused(outcome: Result<impl Sized>, what: &str) {
    let error = outcome.err().unwrap_or_else(|| panic!("{what}: was accepted"));
    assert!(error.message().contains(what), "{what}: {error}");
    assert!(error.help_line().is_some(), "{error}");
}

#[test]
fn memory_contracts() {
    let device = checked();
    let stream = device.create_stream().unwrap();
    let memory = device.allocate(MemoryKind::Device, 1024).unwrap();
    refused(device.allocate(MemoryKind::Device, 0), "0 bytes");
    let mut bytes = [0u8; 64];
    // SAFETY: every one of these calls is refused before it reaches the device.
    unsafe {
        refused(stream.fill(memory.ptr.add(1000), 0, 25), "leave an allocation of 1024 bytes");
        refused(stream.write(memory.ptr.add(1024), &bytes), "no live allocation");
        refused(stream.read(DevicePtr(8), &mut bytes), "no live allocation");
        refused(stream.copy(memory.ptr.add(32), memory.ptr, 64), "overlap");
        refused(device.free(Allocation { bytes: 512, ..memory }), "was changed");
    }
    refused(device.ipc_export(&memory), "private");
    assert_eq!(device.alive().allocations, 1);
    // SAFETY: nothing uses it; the second call is refused.
    unsafe {
        device.free(memory).unwrap();
        refused(device.free(memory), "freed already");
        refused(stream.fill(memory.ptr, 0, 16), "no live allocation");
    }
    assert_eq!(device.alive(), Alive::default());
}

#[test]
fn launch_contracts() {
    let device = checked();
    let stream = device.create_stream().unwrap();
    let modules = Modules::load(&*device, &[&PROBE]).unwrap();
    let probe = modules.function(&PROBE).unwrap();
    let memory = device.allocate(MemoryKind::Device, 1024).unwrap();
    let args = ProbeArgs { dst: Ptr(memory.ptr.0), src: Ptr(memory.ptr.0), count: 256, mul: 1, add: 0, reserved: 0 };
    let shape = LaunchShape { grid: [1, 1, 1], workgroup: [256, 1, 1], lds_bytes: 0 };
    // SAFETY: refused calls reach no device; the one that passes has its buffer alive.
    let launch = |function, shape: LaunchShape, args: &[u8]| unsafe { stream.launch(function, &shape, args) };
    launch(probe, shape, bytes_of(&args)).unwrap();
    refused(launch(FunctionHandle(12345), shape, bytes_of(&args)), "no kernel of a loaded module");
    refused(launch(probe, shape, &bytes_of(&args)[4..]), "bytes of arguments");
    refused(launch(probe, LaunchShape { grid: [0, 1, 1], ..shape }, bytes_of(&args)), "empty");
    refused(launch(probe, LaunchShape { workgroup: [2048, 1, 1], ..shape }, bytes_of(&args)), "past what devices launch");
    refused(launch(probe, LaunchShape { lds_bytes: 1 << 30, ..shape }, bytes_of(&args)), "bytes of LDS");

    // A graph outlives its module: its launch is refused, not run.
    stream.begin_capture(CaptureMode::ThreadLocal).unwrap();
    launch(probe, shape, bytes_of(&args)).unwrap();
    let exec = stream.end_capture().unwrap().instantiate().unwrap();
    // SAFETY: alive, then refused.
    unsafe { stream.launch_graph(&*exec) }.unwrap();
    stream.synchronize().unwrap();
    drop(modules);
    // SAFETY: refused before it reaches the device.
    refused(unsafe { stream.launch_graph(&*exec) }, "node 0");
    // SAFETY: nothing uses it.
    unsafe { device.free(memory) }.unwrap();
}

/// What a capture forbids is told at the call, with stream, mode and the kernel recorded last.
#[test]
fn forbidden_calls_are_attributed() {
    let device = checked();
    let stream = device.create_stream().unwrap();
    let memory = device.allocate(MemoryKind::Device, 1024).unwrap();
    let modules = Modules::load(&*device, &[&PROBE]).unwrap();
    let args = ProbeArgs { dst: Ptr(memory.ptr.0), src: Ptr(memory.ptr.0), count: 256, mul: 1, add: 0, reserved: 0 };
    let shape = LaunchShape { grid: [1, 1, 1], workgroup: [256, 1, 1], lds_bytes: 0 };
    stream.begin_capture(CaptureMode::ThreadLocal).unwrap();
    // SAFETY: the buffer is alive.
    unsafe { stream.launch(modules.function(&PROBE).unwrap(), &shape, bytes_of(&args)) }.unwrap();
    let mut byte = [0u8];
    let calls: [(&str, Result<()>); 6] = [
        ("synchronize", stream.synchronize()),
        ("query", stream.query().map(drop)),
        ("allocate", device.allocate(MemoryKind::Device, 64).map(drop)),
        ("device synchronize", device.synchronize()),
        // SAFETY: refused before it reaches the device.
        ("read", unsafe { stream.read(memory.ptr, &mut byte) }),
        ("begin_capture", stream.begin_capture(CaptureMode::Global)),
    ];
    for (call, outcome) in calls {
        let error: Error = outcome.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invariant("CAP-1"), "{error}");
        for part in [call, "mode ThreadLocal", PROBE.symbol] {
            assert!(error.message().contains(part), "{call}: {error}");
        }
    }
    stream.end_capture().unwrap();
    refused(stream.end_capture(), "began no capture");
    // SAFETY: nothing uses it.
    unsafe { device.free(memory) }.unwrap();
}

#[test]
fn event_contracts() {
    let (device, other) = (checked(), checked());
    let stream = device.create_stream().unwrap();
    let [plain, timed] = [false, true].map(|timing| device.create_event(timing).unwrap());
    refused(stream.record(&*other.create_event(false).unwrap()), "another device");
    refused(timed.seconds_since(&*plain), "has not passed");
    stream.record(&*plain).unwrap();
    stream.record(&*timed).unwrap();
    stream.synchronize().unwrap();
    refused(timed.seconds_since(&*plain), "without timing");
}

/// Builds an executor, captures, prefills and decodes.
fn serve(device: &Arc<dyn Device>, executor: &mut Option<Executor>) -> Result<Vec<i32>> {
    let limits = capstan::config::Limits {
        max_num_seqs: 2,
        max_num_batched_tokens: 32,
        max_model_len: 64,
        cache: capstan::config::CacheBudget::Blocks(8),
        ..serving::limits()
    };
    let executor = executor.insert(Executor::new(device, serving::msa(&limits))?);
    executor.capture(|_| ())?;
    steps(executor)
}

fn steps(executor: &mut Executor) -> Result<Vec<i32>> {
    let id = executor.open_sequence()?;
    executor.grant_blocks(id, &[0, 1])?;
    let prompt = [5, 6, 7, 8];
    let ticket = executor.prefill(&[SequenceStep { sequence: id, tokens: &prompt, kv_len: 4, sampling: Sampling::GREEDY }])?;
    let mut tokens = executor.wait(ticket)?.tokens.to_vec();
    for kv_len in 5..8 {
        let last = [*tokens.last().expect("a token")];
        let ticket = executor.decode(&[SequenceStep { sequence: id, tokens: &last, kv_len, sampling: Sampling::GREEDY }])?;
        tokens.extend_from_slice(executor.wait(ticket)?.tokens);
    }
    executor.close_sequence(id, |_| ())?;
    Ok(tokens)
}

/// Every call fails once: a typed error with a help line, no panic, nothing alive afterwards.
#[test]
fn any_call_may_fail() {
    let fault = Fault::new();
    let expected = serve(&hal::open("cpu").unwrap(), &mut None).unwrap();
    let clean = checked();
    let device = FaultDevice::wrap(clean.clone(), fault.clone());
    fault.fail_at(0);
    assert_eq!(serve(&device, &mut None).unwrap(), expected);
    let calls = fault.calls();
    assert!(calls > 100, "{calls} calls");
    // All of the first, where everything is made; then a stride through the many that are alike.
    let numbers = (1..=calls).filter(|&number| number < 60 || number % (calls / 150).max(1) == 0 || number + 40 > calls);
    let mut failed = 0;
    for number in numbers {
        fault.fail_at(number);
        let mut executor = None;
        match serve(&device, &mut executor) {
            // A failure on a path that has another way, such as asking how much memory is free.
            Ok(tokens) => assert_eq!(tokens, expected, "call {number}"),
            Err(error) => {
                failed += 1;
                assert!(!error.message().is_empty() && error.help_line().is_some(), "call {number}: {error:?}");
                fault.fail_at(0);
                // Either it goes on, or it says that it ended and why.
                if let Some(executor) = &mut executor
                    && executor.poison().is_none()
                    && !executor.graphs().is_empty()
                {
                    drop(executor.drain());
                    if executor.sequences().is_empty() {
                        assert_eq!(steps(executor).unwrap(), expected, "call {number}: after {error}");
                    }
                }
            }
        }
        fault.fail_at(0);
        drop(executor);
        assert_eq!(clean.alive(), Alive::default(), "call {number} leaks");
    }
    assert!(failed > 100, "{failed} failures");
    assert_eq!(serve(&device, &mut None).unwrap(), expected, "the device is as good as before");
}
