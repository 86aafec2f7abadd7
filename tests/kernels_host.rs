//! The device sources, run on the host lane by lane, leave what the CPU ops leave: bit for bit, but for matrix instructions.
//!
//! `tests/kernels/host.h` is the platform: fibers for lanes, waves of 32 and of 64. Needs a C++20 compiler (CAPSTAN_CXX, clang++ or
//! g++); skips by name without one, unless `CAPSTAN_REQUIRE_COMPILERS=1`.

#![expect(unsafe_code, reason = "calls kernels compiled to a shared library, on memory of the test")]

mod kernels;

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;

use capstan::kernels::build::sources;
use kernels::ops::{run_op, with_memory};
use kernels::{Case, Draw, cases, rounds};
use libloading::Library;

/// The device sources of one wave size.
struct Host {
    wave: u32,
    libraries: HashMap<&'static str, Library>,
    _directory: tempfile::TempDir,
}

type Launch = unsafe extern "C" fn(*const c_void, *const c_void, u32, *const u32, u64) -> *const c_char;

impl Host {
    fn compile(compiler: &str, wave: u32) -> Host {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let directory = tempfile::tempdir().expect("a directory");
        let mut libraries = HashMap::new();
        for source in sources() {
            let library: PathBuf = directory.path().join(format!("{}.so", source.stem()));
            let output = Command::new(compiler)
                .args(["-x", "c++", "-std=c++20", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-w"])
                .args(if cfg!(target_arch = "x86_64") { &["-mfma"][..] } else { &[] })
                .arg("-DCAPSTAN_PLATFORM=\"host.h\"")
                .arg(format!("-DHOST_WAVE={wave}"))
                .args([
                    format!("-I{}", root.join("kernels/include").display()),
                    format!("-I{}", root.join("tests/kernels").display()),
                ])
                .arg(root.join("kernels").join(source.name))
                .arg("-o")
                .arg(&library)
                .output()
                .expect("the compiler runs");
            assert!(output.status.success(), "{}: {}", source.name, String::from_utf8_lossy(&output.stderr));
            // SAFETY: a library just built from this repository; its initialisers are those of C++.
            libraries.insert(source.name, unsafe { Library::new(&library) }.expect("the library loads"));
        }
        Host { wave, libraries, _directory: directory }
    }

    fn run(&self, case: &Case, seed: u64) -> Vec<Vec<u8>> {
        let library = &self.libraries[case.kernel.source];
        // SAFETY: host.h and the source define both.
        let (launch, kernel) = unsafe {
            let launch = *library.get::<Launch>(b"host_launch").expect("host_launch");
            (launch, *library.get::<*const c_void>(case.kernel.symbol.as_bytes()).expect("the kernel"))
        };
        with_memory(case, |args| {
            // SAFETY: the arguments point to memory of the declared extents; nothing else uses it.
            let error = unsafe { launch(kernel, args.as_ptr().cast(), args.len() as u32, case.shape.grid.as_ptr(), seed) };
            if !error.is_null() {
                // SAFETY: a string literal of host.h.
                panic!("{} in waves of {}: {}", case.name, self.wave, unsafe { CStr::from_ptr(error) }.to_string_lossy());
            }
        })
    }
}

fn compiler() -> Option<String> {
    let given = std::env::var("CAPSTAN_CXX").ok();
    let names = given.map_or_else(|| ["clang++-22", "clang++", "g++"].map(String::from).to_vec(), |name| vec![name]);
    let found = names.into_iter().find(|name| Command::new(name).arg("--version").output().is_ok_and(|out| out.status.success()));
    if found.is_none() {
        assert!(std::env::var_os("CAPSTAN_REQUIRE_COMPILERS").is_none(), "no C++ compiler");
        eprintln!("skipped: no C++ compiler");
    }
    found
}

fn compare(wave: u32) {
    let Some(compiler) = compiler() else { return };
    let host = Host::compile(&compiler, wave);
    let mut draw = Draw::seeded(&format!("device sources in waves of {wave}"));
    for _ in 0..rounds() {
        for case in cases(&mut draw) {
            let expected = run_op(&case);
            let found = host.run(&case, draw.0.next_u64());
            case.check(&expected, &found, &format!("the host in waves of {wave}"));
            // Lanes in another order: the same bits, or a barrier is missing.
            let again = host.run(&case, draw.0.next_u64());
            assert!(found == again, "{}: the order of lanes changes the result", case.name);
        }
    }
}

#[test]
fn waves_of_32_give_the_cpu_ops_results() {
    compare(32);
}

#[test]
fn waves_of_64_give_the_cpu_ops_results() {
    compare(64);
}
