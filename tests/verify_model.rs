//! `capstan verify-model` on the recorded checkpoints, and on damaged references.

use std::path::{Path, PathBuf};

use capstan::dtype::DType;
use capstan::error::ErrorKind;
use capstan::hal;
use capstan::measure::verify_model::{ModelVerified, verify_model};

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

/// A checkpoint whose recorded logits belong to other weights is past the bound, and named.
#[test]
fn a_wrong_reference_is_named() {
    let Some(dir) = fixture("m3-nano") else { return };
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(&dir).unwrap() {
        let path = entry.unwrap().path();
        std::fs::write(copy.path().join(path.file_name().unwrap()), std::fs::read(&path).unwrap()).unwrap();
    }
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
