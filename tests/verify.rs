//! `capstan verify` on the recorded cases, on damaged copies of them, and on files that are none.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use capstan::error::ErrorKind;
use capstan::hal::cpu::CpuDevice;
use capstan::hal::{self, Device};
use capstan::measure::verify::{RankCase, Verified, verify_case, verify_case_as_rank};
use capstan::peers::{Group, ThreadGroup};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

fn cases() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/fixtures/indexer");
    let Ok(entries) = std::fs::read_dir(&folder) else {
        println!("skipped: {} is not there", folder.display());
        return Vec::new();
    };
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("a readable folder").path()).collect();
    files.sort();
    files
}

fn verify(path: &Path) -> capstan::Result<Verified> {
    verify_case(&hal::open(&std::env::var("CAPSTAN_DEVICE").unwrap_or_else(|_| "cpu".into()))?, path)
}

#[test]
fn every_recorded_case_holds() {
    for path in cases() {
        let verified = verify(&path).unwrap();
        assert_eq!(verified.first_difference(), None);
        // Both modes, and at least the selection in each.
        assert!(verified.comparisons.len() >= 2, "{verified:?}");
    }
}

/// What each rank of `world` says of its file.
fn as_ranks(world: u32, file: impl Fn(u32) -> PathBuf + Sync) -> Vec<capstan::Result<RankCase>> {
    let groups = ThreadGroup::all(world, Duration::from_secs(60));
    std::thread::scope(|scope| {
        let start = |group: Arc<ThreadGroup>| {
            let file = &file;
            scope.spawn(move || {
                let device: Arc<dyn Device> = CpuDevice::new(1)?;
                let path = file(group.rank());
                verify_case_as_rank(&device, &path, &(group as Arc<dyn Group>), 30_000)
            })
        };
        let ranks: Vec<_> = groups.into_iter().map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn ranks_that_share_a_recorded_case_give_what_one_rank_alone_does() {
    let heads = |path: &Path| -> u32 {
        let bytes = std::fs::read(path).unwrap();
        let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
        metadata.metadata().as_ref().unwrap()["heads"].parse().unwrap()
    };
    for (path, world) in cases().iter().flat_map(|path| [2, 4].map(|world| (path, world))) {
        for case in as_ranks(world, |_| path.clone()) {
            let case = case.unwrap();
            match heads(path).is_multiple_of(world) {
                true => assert!(case.refused.is_empty() && case.compared > 0, "{case:?}"),
                false => assert!(case.refused[0].contains("do not divide") && case.compared == 0, "{case:?}"),
            }
        }
    }
}

#[test]
fn ranks_that_bring_other_cases_say_so() {
    let all = cases();
    let of = |name: &str| all.iter().find(|path| path.ends_with(name)).cloned();
    let (Some(a), Some(b)) = (of("msa-decode_h4_q1.safetensors"), of("msa-prefill_h4.safetensors")) else { return };
    for error in as_ranks(2, |rank| if rank == 0 { a.clone() } else { b.clone() }) {
        let error = error.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invariant("RANK-1"), "{error}");
        assert!(error.message().contains("decode_h4_q1") && error.message().contains("prefill_h4"), "{error}");
    }
}

/// Writes a copy of a case with one tensor's bytes changed.
fn damaged(path: &Path, tensor: &str, into: &Path, change: impl FnOnce(&mut [u8])) {
    let bytes = std::fs::read(path).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut data = tensors.tensor(tensor).unwrap().data().to_vec();
    change(&mut data);
    let views = tensors.tensors().into_iter().map(|(name, view)| {
        let data = if name == tensor { &data[..] } else { view.data() };
        (name, TensorView::new(view.dtype(), view.shape().to_vec(), data).unwrap())
    });
    let copy = safetensors::serialize(views.collect::<Vec<_>>(), metadata.metadata().clone()).unwrap();
    std::fs::write(into, copy).unwrap();
}

/// One changed value a tensor is found, and named with its place.
#[test]
fn a_changed_value_is_named() {
    let Some(path) = cases().into_iter().find(|path| path.ends_with("msa-decode_h1_q4.safetensors")) else { return };
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("copy.safetensors");
    // (tensor, byte of the value, its new bytes): row 0 sees something in this case.
    let float = |value: f32| value.to_le_bytes().to_vec();
    let changes = [
        ("score", 0, float(7.5), "head 0, row 0, block 0: expected 7.5"),
        ("topk_idx", 4, 99i32.to_le_bytes().to_vec(), "head 0, row 0, place 1: expected block 99"),
        ("sparse_block_table", 0, 12_345i32.to_le_bytes().to_vec(), "row 0, KV head 0, page 0: expected 12345"),
        ("sparse_context_lens", 4, 1i32.to_le_bytes().to_vec(), "row 1, KV head 0: expected 1,"),
        ("attend_output", 6, half::bf16::from_f32(3.0).to_le_bytes().to_vec(), "row 0, head 0, channel 3: expected 3,"),
    ];
    for (tensor, at, bytes, place) in changes {
        damaged(&path, tensor, &copy, |data| data[at..at + bytes.len()].copy_from_slice(&bytes));
        let difference = verify(&copy).unwrap().first_difference().unwrap_or_else(|| panic!("{tensor}: not found"));
        assert!(difference.contains(tensor) && difference.contains(place), "{tensor}: {difference}");
    }
}

/// An untouched place that is written is a difference, even by the value it would have.
#[test]
fn untouched_means_untouched() {
    let Some(path) = cases().into_iter().find(|path| path.ends_with("msa-decode_h4_q1.safetensors")) else { return };
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("copy.safetensors");
    damaged(&path, "score", &copy, |data| {
        let untouched = 12345.0f32.to_le_bytes();
        let at = data.chunks(4).position(|value| value != untouched).unwrap() * 4;
        data[at..at + 4].copy_from_slice(&untouched);
    });
    assert!(verify(&copy).unwrap().first_difference().unwrap().contains("expected 12345"));
}

#[test]
fn files_that_are_no_case_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("case.safetensors");
    let refused = |what: &str| {
        let error = verify(&file).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Input, "{error}");
        assert!(error.message().contains("case.safetensors") && error.message().contains(what), "{what}: {error}");
        assert!(error.help_line().is_some());
    };
    refused("No such file");
    std::fs::write(&file, b"").unwrap();
    refused("");
    std::fs::write(&file, b"not a safetensors file at all").unwrap();
    refused("");
    let empty: Vec<(String, TensorView<'_>)> = Vec::new();
    std::fs::write(&file, safetensors::serialize(empty, None).unwrap()).unwrap();
    refused("heads");
    for path in cases().into_iter().take(1) {
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
        refused("");
        // A block id past the cache, a length past the table.
        damaged(&path, "block_table", &file, |data| data[..4].copy_from_slice(&100_000i32.to_le_bytes()));
        refused("block_table");
        damaged(&path, "seq_lens", &file, |data| data[..4].copy_from_slice(&1_000_000i32.to_le_bytes()));
        refused("seq_lens");
    }
}
