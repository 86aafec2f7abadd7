//! Devices that are not there say why: no library, an old one, no device, an old device, no memory. Needs `cc`, and no GPU.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Runs `capstan` with a driver library and what that library plays.
fn capstan(arguments: &[&str], variable: &str, library: &Path, absent: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_capstan"));
    command.args(arguments).env(variable, library).env("ABSENT", absent).env_remove("RUST_LOG");
    command.output().expect("the command runs")
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Builds a library from C beside this file.
fn library(dir: &Path, source: &str, flags: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/absent").join(source);
    let library = dir.join(source.with_extension("so").file_name().expect("a name"));
    let built =
        Command::new("cc").args(["-shared", "-fPIC", "-O1", "-w"]).args(flags).arg("-o").arg(&library).arg(&source).status();
    assert!(built.expect("cc is there").success());
    library
}

#[test]
fn no_library_is_told_with_the_loaders_word() {
    let output = capstan(&["devices", "--device", "cuda"], "CAPSTAN_CUDA", Path::new("/nowhere/libcuda.so.1"), "");
    assert!(output.status.success(), "a list of devices is no failure: {}", stderr(&output));
    assert!(stdout(&output).contains("not available: no library /nowhere/libcuda.so.1"), "{}", stdout(&output));
    let output = capstan(&["run", "--device", "cuda"], "CAPSTAN_CUDA", Path::new("/nowhere/libcuda.so.1"), "");
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("CAPSTAN_CUDA") && stderr(&output).contains("--device cpu"), "{}", stderr(&output));
}

#[test]
fn a_library_without_a_required_symbol_is_told_which() {
    let output = capstan(&["run", "--device", "cuda"], "CAPSTAN_CUDA", Path::new("libc.so.6"), "");
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("libc.so.6 has no cuInit"), "{}", stderr(&output));
    let output = capstan(&["run", "--device", "hip"], "CAPSTAN_HIP_LIBRARY", Path::new("libc.so.6"), "");
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("libc.so.6 has no hipInit"), "{}", stderr(&output));
}

#[test]
fn what_is_wrong_with_a_cuda_device_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let library = library(dir.path(), "cuda.c", &[]);
    for (absent, call, wanted) in [
        ("no_device", "cuInit returned 100", "no CUDA device is visible: no CUDA-capable device is detected"),
        ("old", "", "Old Card is sm_61; the kernels need sm_80 or later"),
        ("no_memory", "returned 2", "out of memory"),
    ] {
        let output = capstan(&["run", "--device", "cuda"], "CAPSTAN_CUDA", &library, absent);
        let told = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{absent}: {told}");
        assert!(told.contains(wanted) && told.contains(call) && told.contains("help: "), "{absent}: {told}");
    }
    let listed = stdout(&capstan(&["devices", "--device", "cuda"], "CAPSTAN_CUDA", &library, "no_device"));
    assert!(listed.contains("not available: no CUDA device is visible"), "{listed}");
}

#[test]
fn what_is_wrong_with_a_hip_device_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let new = library(dir.path(), "hip.c", &[]);
    for (absent, call, wanted) in [
        ("no_device", "hipGetDeviceCount returned 100", "no HIP device is visible: no ROCm-capable device is detected"),
        ("old_runtime", "", "HIP runtime 5.1.20532 is too old: HIP runtime 5.2.0 is the oldest that fits"),
        ("old", "", "Some Card is gfx803; the kernels need gfx900 or later"),
        ("no_memory", "returned 2", "out of memory"),
    ] {
        let output = capstan(&["run", "--device", "hip"], "CAPSTAN_HIP_LIBRARY", &new, absent);
        let told = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{absent}: {told}");
        assert!(told.contains(wanted) && told.contains(call) && told.contains("help: "), "{absent}: {told}");
    }
    let listed = stdout(&capstan(&["devices", "--device", "hip"], "CAPSTAN_HIP_LIBRARY", &new, ""));
    assert!(listed.contains("gfx942:sramecc+:xnack-") && listed.contains("HIP runtime 6.3.42134"), "{listed}");
    // Before 6.0 there is one layout of the properties, and it is another one.
    let legacy = library(dir.path(), "hip.c", &["-DLEGACY"]);
    let told = stderr(&capstan(&["run", "--device", "hip"], "CAPSTAN_HIP_LIBRARY", &legacy, "legacy"));
    assert!(told.contains("Some Card is gfx701"), "{told}");
}
