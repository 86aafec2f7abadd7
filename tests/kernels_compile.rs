//! Every kernel compiles for every architecture this project promises, spills nothing, and takes our argument structs.
//!
//! AMD: clang's code objects, read back with llvm-readelf and llvm-objdump. NVIDIA: NVRTC's own report. A compiler that is not there
//! skips its architecture by name; `CAPSTAN_REQUIRE_COMPILERS=1` (CI) makes that a failure.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use capstan::kernels::build::{Compiler, Object, Source, Target, sources};
use capstan::kernels::registry;

/// Kernels of a source.
fn kernels_of(source: &Source) -> Vec<&'static capstan::kernels::KernelSpec> {
    registry::built().filter(|kernel| kernel.source == source.name).collect()
}

fn skip(arch: &str, why: &dyn std::fmt::Display) {
    assert!(std::env::var_os("CAPSTAN_REQUIRE_COMPILERS").is_none(), "{arch}: {why}");
    eprintln!("skipped {arch}: {why}");
}

/// Compiles every source; `None` if the compiler is not there.
fn compile(arch: &str) -> Option<Vec<(Source, Object)>> {
    let target = Target::new(arch).expect("an architecture");
    match Compiler::find_offline(target) {
        Ok(compiler) => Some(
            sources()
                .map(|source| (source, compiler.compile(&source, target).unwrap_or_else(|error| panic!("{error}"))))
                .collect(),
        ),
        Err(error) => {
            skip(arch, &error);
            None
        }
    }
}

/// Runs an LLVM tool on a file, by its plain name or that of one of Debian's versions.
fn llvm(tool: &str, arguments: &[&str], file: &Path) -> Option<String> {
    let names = ["-22", "-23", "-21", "-20", "-19", ""].map(|version| format!("{tool}{version}"));
    let output = names.iter().find_map(|name| Command::new(name).args(arguments).arg(file).output().ok())?;
    assert!(output.status.success(), "{tool}: {}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// One kernel of `llvm-readelf --notes`: its fields, and (offset, size, kind) of its arguments.
#[derive(Debug, Default)]
struct Metadata {
    fields: BTreeMap<String, String>,
    arguments: Vec<BTreeMap<String, String>>,
}

impl Metadata {
    fn number(&self, field: &str) -> u64 {
        let text = self.fields.get(field).unwrap_or_else(|| panic!("no {field} in {self:?}"));
        text.parse().unwrap_or_else(|_| panic!("{field} is {text}"))
    }
}

/// Reads the YAML of AMDGPU's metadata note: a list item is `  - .key:`, an argument `      - .key:`.
fn metadata(notes: &str) -> BTreeMap<String, Metadata> {
    let (mut kernels, mut current) = (BTreeMap::new(), None::<Metadata>);
    let mut finish = |kernel: Option<Metadata>| {
        if let Some(kernel) = kernel {
            kernels.insert(kernel.fields.get(".name").expect("a kernel has a name").clone(), kernel);
        }
    };
    let lines = notes.lines().skip_while(|line| line.trim() != "amdhsa.kernels:").skip(1);
    for line in lines.take_while(|line| line.starts_with(' ')) {
        let indent = line.len() - line.trim_start().len();
        let item = line.trim_start().starts_with("- ");
        let (key, value) = line.trim_start().trim_start_matches("- ").split_once(':').expect("key: value");
        let (key, value) = (key.to_string(), value.trim().to_string());
        if indent == 2 && item {
            finish(current.replace(Metadata::default()));
        }
        let kernel = current.as_mut().expect("a kernel starts the list");
        if indent >= 6 {
            if item {
                kernel.arguments.push(BTreeMap::new());
            }
            kernel.arguments.last_mut().expect("an argument").insert(key, value);
        } else {
            kernel.fields.insert(key, value);
        }
    }
    finish(current);
    kernels
}

/// LDS of a workgroup that every chain's launch may count on, bytes.
const LDS_MOST: u64 = 64 << 10;

fn check_amd(arch: &str, matrix_instruction: &str) {
    let Some(objects) = compile(arch) else { return };
    let directory = tempfile::tempdir().expect("a directory");
    for (source, object) in objects {
        assert_eq!(object.log, "", "{} warns for {arch}", source.name);
        let file = directory.path().join(source.stem());
        fs::write(&file, &object.bytes).expect("writes");
        let Some(notes) = llvm("llvm-readelf", &["--notes"], &file) else { return skip(arch, &"no llvm-readelf") };
        let kernels = metadata(&notes);
        let expected = kernels_of(&source);
        assert_eq!(kernels.len(), expected.len(), "{} for {arch}: {:?}", source.name, kernels.keys());
        for kernel in expected {
            let found = kernels.get(kernel.symbol).unwrap_or_else(|| panic!("{} has no {}", source.name, kernel.symbol));
            let first = found.arguments.first().unwrap_or_else(|| panic!("{} takes nothing", kernel.symbol));
            let argument = |key: &str| first.get(key).map(String::as_str).unwrap_or_default();
            assert_eq!((argument(".offset"), argument(".value_kind")), ("0", "by_value"), "{}", kernel.symbol);
            assert_eq!(argument(".size"), kernel.args.bytes.to_string(), "{}: size of its arguments", kernel.symbol);
            let hidden = found.arguments[1..].iter().all(|argument| argument[".value_kind"].starts_with("hidden_"));
            assert!(hidden, "{} takes more than its struct", kernel.symbol);
            for field in [".private_segment_fixed_size", ".vgpr_spill_count"] {
                assert_eq!(found.number(field), 0, "{}: {field} for {arch}", kernel.symbol);
            }
            assert!(found.number(".group_segment_fixed_size") <= LDS_MOST, "{}: LDS for {arch}", kernel.symbol);
            assert_eq!(found.number(".max_flat_workgroup_size"), 256, "{}", kernel.symbol);
        }
        if source.name == "score.hip" {
            let Some(code) = llvm("llvm-objdump", &["-d"], &file) else { return skip(arch, &"no llvm-objdump") };
            assert!(code.contains(matrix_instruction), "score.hip for {arch} has no {matrix_instruction}");
        }
    }
}

#[test]
fn gfx950_has_the_scaled_fp8_matrix_instruction_and_no_spills() {
    check_amd("gfx950", "v_mfma_scale_f32_16x16x128_f8f6f4");
}

#[test]
fn gfx942_has_the_fp8_matrix_instruction_and_no_spills() {
    check_amd("gfx942", "v_mfma_f32_16x16x32_fp8_fp8");
}

#[test]
fn sm_90_has_every_kernel_and_no_spills() {
    let Some(objects) = compile("sm_90") else { return };
    for (source, object) in objects {
        assert!(!object.log.contains("warning"), "{} warns:\n{}", source.name, object.log);
        let kernels = kernels_of(&source);
        // ptxas reports each kernel: its name, then its stack and spills, then its registers.
        for kernel in &kernels {
            assert!(
                object.log.contains(&format!("'{}'", kernel.symbol)),
                "{}: no {}:\n{}",
                source.name,
                kernel.symbol,
                object.log
            );
        }
        let clean = object.log.matches("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads").count();
        assert_eq!(clean, kernels.len(), "{} spills:\n{}", source.name, object.log);
        assert!(object.bytes.starts_with(b"\x7fELF"), "{} is no cubin", source.name);
    }
}

#[test]
fn a_refusal_names_the_compiler_and_shows_its_log() {
    for arch in ["gfx950", "sm_90"] {
        let target = Target::new(arch).expect("an architecture");
        let compiler = match Compiler::find_offline(target) {
            Ok(compiler) => compiler,
            Err(error) => {
                skip(arch, &error);
                continue;
            }
        };
        let broken =
            Source { name: "broken.hip", text: "#include \"platform.h\"\nKERNEL void broken(int a) { undeclared = a; }\n" };
        let error = compiler.compile(&broken, target).expect_err("undeclared").to_string();
        assert!(error.contains("broken.hip") && error.contains("undeclared") && error.contains(compiler.version()), "{error}");
    }
}
