//! `capstan verify-model` on the recorded checkpoints, and on damaged references.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use capstan::dtype::DType;
use capstan::error::ErrorKind;
use capstan::hal;
use capstan::measure::verify_model::{ModelVerified, cache_deviation, verify_model};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

fn fixture(name: &str) -> Option<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/fixtures").join(name);
    if !dir.is_dir() {
        println!("skipped: {} is not there", dir.display());
        return None;
    }
    Some(dir)
}

fn verify(dir: &Path, dtypes: (DType, DType)) -> capstan::Result<ModelVerified> {
    let device = hal::open(&std::env::var("CAPSTAN_DEVICE").unwrap_or_else(|_| "cpu".into()))?;
    verify_model(&device, dir, dtypes, |_, _| ())
}

const EXACT: (DType, DType) = (DType::F32, DType::F32);

#[test]
fn both_namings_hold_with_f32_caches() {
    for dir in ["m3-nano", "m3-nano-published"].into_iter().filter_map(fixture) {
        let verified = verify(&dir, EXACT).unwrap();
        assert_eq!(verified.first_difference(), None);
        // Logits and tokens of three prompts, and blocks of their sparse layers.
        assert!(verified.deviations.len() > 6 && verified.replayed > 0, "{verified:?}");
    }
}

#[test]
fn narrow_caches_deviate_and_are_reported() {
    let Some(dir) = fixture("m3-nano") else { return };
    let logits = |dtypes| {
        let verified = verify(&dir, dtypes).unwrap();
        verified
            .deviations
            .iter()
            .filter(|found| found.tensor.ends_with(".logits"))
            .map(|found| found.largest)
            .fold(0.0, f64::max)
    };
    let (exact, bf16, fp8) = (logits(EXACT), logits((DType::Bf16, DType::Bf16)), logits((DType::F8E4M3, DType::F8E4M3)));
    assert!(exact < bf16 && bf16 < fp8, "{exact} {bf16} {fp8}");
}

/// Narrow caches against f32 ones: exact against themselves, and the narrower the further.
#[test]
fn narrow_caches_are_compared_layer_by_layer() {
    let Some(dir) = fixture("m3-nano") else { return };
    let device = hal::open("cpu").unwrap();
    let [exact, bf16, fp8] = [DType::F32, DType::Bf16, DType::F8E4M3].map(|dtype| {
        let found = cache_deviation(&device, &dir, (dtype, dtype), |_, _| ()).unwrap();
        // Three prompts, the last row of each and 24 steps.
        assert_eq!((found.rows, found.layers.len()), (75, 3));
        assert!(found.layers[0].selected_too.is_none() && found.layers[1].selected_too.is_some());
        found
    });
    assert!(exact.logits == 0.0 && exact.same_token == 1.0);
    for layer in 0..3 {
        let rms = [&exact, &bf16, &fp8].map(|found| found.layers[layer].rms);
        assert!(rms[0] == 0.0 && rms[0] < rms[1] && rms[1] < rms[2] && rms[2] < 1.0, "layer {layer}: {rms:?}");
        if layer > 0 {
            let kept = [&exact, &bf16, &fp8].map(|found| found.layers[layer].selected_too.unwrap());
            assert!(kept[0] == 1.0 && kept[1] <= 1.0 && kept[2] < kept[1] && kept[2] > 0.5, "layer {layer}: {kept:?}");
        }
    }
}

fn copy_of(dir: &Path) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        std::fs::write(copy.path().join(path.file_name().unwrap()), std::fs::read(&path).unwrap()).unwrap();
    }
    copy
}

/// A checkpoint whose recorded logits belong to other weights is past the bound, and named.
#[test]
fn a_wrong_reference_is_named() {
    let Some(dir) = fixture("m3-nano") else { return };
    let copy = copy_of(&dir);
    let file = copy.path().join("reference.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let offsets = {
        let (header, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let (start, _) = metadata.info("p0.logits").unwrap().data_offsets;
        8 + header + start
    };
    bytes[offsets..offsets + 4].copy_from_slice(&9.0f32.to_le_bytes());
    std::fs::write(&file, &bytes).unwrap();
    let difference = verify(copy.path(), EXACT).unwrap().first_difference().unwrap();
    assert!(difference.starts_with("p0.logits: step 0, token 0: expected 9"), "{difference}");
    std::fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    let error = verify(copy.path(), EXACT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Input);
    assert!(error.message().contains("reference.safetensors"), "{error}");
}

/// A recorded tensor: type, shape, bytes.
type Recorded = (Dtype, Vec<usize>, Vec<u8>);

/// References that say something else, or nothing that can be compared.
#[test]
fn damaged_references_fail_and_are_named() {
    let Some(dir) = fixture("m3-nano") else { return };
    let copy = copy_of(&dir);
    let file = copy.path().join("reference.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    let recorded = SafeTensors::deserialize(&bytes).unwrap();
    let copied = |(name, view): (String, TensorView<'_>)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()));
    let recorded: BTreeMap<String, Recorded> = recorded.tensors().into_iter().map(copied).collect();
    type Damage = fn(&mut BTreeMap<String, Recorded>);
    const BLOCKS: &str = "p2.decode_blocks.layer1";
    let wrong: [(Damage, &str); 4] = [
        (|all| all.get_mut("p1.logits").unwrap().2[..4].copy_from_slice(&f32::NAN.to_le_bytes()), "p1.logits: step 0, token 0"),
        // The last one: what comes before is computed from the others.
        (|all| all.get_mut("p2.greedy_ids").unwrap().2[23 * 4] ^= 1, "p2.greedy_ids: step 23: expected"),
        (|all| all.get_mut(BLOCKS).unwrap().2[0] ^= 1, "p2.decode_blocks.layer1: row 0, head 0: expected"),
        (|all| all.get_mut("p2.prefill_last_blocks.layer2").unwrap().2[0] ^= 1, "p2.prefill_last_blocks.layer2: row 0, head 0"),
    ];
    let unreadable: [(Damage, &str); 8] = [
        (|all| drop(all.remove("p0.logits")), "there is no tensor p0.logits"),
        (|all| drop(all.remove("p0.input_ids")), "there is no tensor p0.input_ids"),
        (|all| drop(all.remove("p1.input_ids")), "unknown tensor p1."),
        (|all| drop(all.insert("p0.decode_blocks.layer0".into(), all[BLOCKS].clone())), "unknown tensor p0.decode_blocks.layer0"),
        (|all| all.get_mut("p0.logits").unwrap().1 = vec![12, 512], "tensor p0.logits is"),
        (|all| all.get_mut("p0.greedy_ids").unwrap().2[1] = 1, "is not in the vocabulary of 256"),
        (|all| all.get_mut(BLOCKS).unwrap().1.swap(1, 2), "tensor p2.decode_blocks.layer1 has shape"),
        (|all| all.get_mut(BLOCKS).unwrap().0 = Dtype::F32, "tensor p2.decode_blocks.layer1 holds F32"),
    ];
    let damaged = |damage: Damage| {
        let mut all = recorded.clone();
        damage(&mut all);
        let views = all.iter().map(|(name, (dtype, shape, data))| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
        safetensors::serialize_to_file(views, None, &file).unwrap();
        verify(copy.path(), EXACT)
    };
    for (damage, message) in wrong {
        let difference = damaged(damage).unwrap().first_difference().expect(message);
        assert!(difference.starts_with(message), "{difference}");
    }
    for (damage, message) in unreadable {
        let error = damaged(damage).expect_err(message);
        assert!(error.kind() == ErrorKind::Input && error.message().contains(message), "{message}: {error}");
        assert!(error.message().contains("reference.safetensors: ") && error.help_line().is_some(), "{error}");
    }
}

/// The command prints each tensor's deviation and fails past a bound.
#[cfg(feature = "cli")]
#[test]
fn the_command_fails_past_a_bound() {
    let Some(dir) = fixture("m3-nano") else { return };
    let run = |dir: &Path, more: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_capstan"));
        let output = command.args(["verify-model", "--device", "cpu"]).arg(dir).args(more).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, table, _) = run(&dir, &[]);
    assert!(code == 0 && table.contains("p2.decode_blocks.layer2") && !table.contains("NO"), "{table}");
    let copy = copy_of(&dir);
    let file = copy.path().join("reference.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let (header, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let at = 8 + header + metadata.info("p1.logits").unwrap().data_offsets.0;
    bytes[at..at + 4].copy_from_slice(&9.0f32.to_le_bytes());
    std::fs::write(&file, bytes).unwrap();
    let (code, table, stderr) = run(copy.path(), &[]);
    assert!(code == 1 && stderr.contains("first difference: p1.logits: step 0, token 0"), "{code}: {stderr}");
    assert_eq!(table.lines().filter(|line| line.contains("NO")).count(), 1, "{table}");
    let (code, json, _) = run(&dir, &["--cache", "bf16", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert!(code == 0 && report["layers"].as_array().unwrap().len() == 3 && report["kv_dtype"] == "bf16", "{report}");
}
