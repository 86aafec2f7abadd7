//! Checkpoints: both namings pack the same bytes, everything wrong is an error that names the file and the tensor, and random
//! checkpoints open.

mod oracle;

use std::collections::BTreeMap;
use std::path::Path;

use capstan::config::ModelShape;
use capstan::error::ErrorKind;
use capstan::model::{Checkpoint, LayerWeight, Naming, Weight, make};
use oracle::{Tensors, fixtures};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

/// Every weight's bytes.
fn packed(checkpoint: &Checkpoint) -> BTreeMap<Weight, Vec<u8>> {
    let one = |weight: &capstan::model::PackedWeight| {
        let mut all = Vec::new();
        let sink = |offset: u64, bytes: &[u8]| {
            assert_eq!(offset, all.len() as u64, "pieces come in order");
            all.extend_from_slice(bytes);
            Ok(())
        };
        checkpoint.stream(weight, sink).unwrap();
        assert_eq!(all.len() as u64, weight.shape.iter().product::<u64>() * weight.dtype.bytes());
        (weight.weight, all)
    };
    checkpoint.weights().iter().map(one).collect()
}

#[test]
fn both_namings_pack_the_same_bytes() {
    let resaved = Checkpoint::open(&fixtures().join("m3-nano")).unwrap();
    let published = Checkpoint::open(&fixtures().join("m3-nano-published")).unwrap();
    assert_eq!((resaved.naming(), published.naming()), (Naming::Resaved, Naming::Published));
    assert_eq!(resaved.shape(), published.shape());
    let (a, b) = (packed(&resaved), packed(&published));
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    for (weight, bytes) in &a {
        assert_eq!(bytes, &b[weight], "{weight}");
    }
}

#[test]
fn projections_are_stacked_and_norms_widened() {
    let dir = fixtures().join("m3-nano");
    let (checkpoint, tensors) = (Checkpoint::open(&dir).unwrap(), Tensors::checkpoint(&dir));
    let packed = packed(&checkpoint);
    let bf16 = |bytes: &[u8]| -> Vec<f64> { bytes.chunks(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f64()).collect() };
    let qkv = bf16(&packed[&Weight::Layer(1, LayerWeight::Qkv)]);
    let names = ["q_proj", "k_proj", "v_proj", "indexer.q_proj", "indexer.k_proj"];
    let expected: Vec<f64> =
        names.iter().flat_map(|name| tensors.get(&format!("model.layers.1.self_attn.{name}.weight")).to_vec()).collect();
    assert_eq!(qkv, expected);
    let norm = &packed[&Weight::Layer(1, LayerWeight::IndexKNorm)];
    let norm: Vec<f64> = norm.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()).into()).collect();
    assert_eq!(norm, tensors.get("model.layers.1.self_attn.indexer.k_norm.weight"));
}

/// A tensor on its way to a file.
#[derive(Clone)]
struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

/// A checkpoint that can be changed.
struct Draft(BTreeMap<String, Tensor>);

impl Draft {
    fn nano() -> Draft {
        let bytes = std::fs::read(fixtures().join("m3-nano/model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let copy = |(name, view): (String, TensorView<'_>)| {
            (name, Tensor { dtype: view.dtype(), shape: view.shape().to_vec(), data: view.data().to_vec() })
        };
        Draft(tensors.tensors().into_iter().map(copy).collect())
    }

    fn save(&self, dir: &Path) {
        std::fs::copy(fixtures().join("m3-nano/config.json"), dir.join("config.json")).unwrap();
        let views = self.0.iter().map(|(name, t)| (name, TensorView::new(t.dtype, t.shape.clone(), &t.data).unwrap()));
        safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
    }
}

/// Opens what `change` made of m3-nano.
fn open_changed(change: impl FnOnce(&mut BTreeMap<String, Tensor>)) -> capstan::Result<Checkpoint> {
    let dir = tempfile::tempdir().unwrap();
    let mut draft = Draft::nano();
    change(&mut draft.0);
    draft.save(dir.path());
    Checkpoint::open(dir.path())
}

#[test]
fn wrong_tensors_are_named() {
    const Q: &str = "model.layers.1.self_attn.q_proj.weight";
    type Change = fn(&mut BTreeMap<String, Tensor>);
    let cases: [(&str, Change, &str); 10] = [
        ("missing", |t| drop(t.remove(Q)), "is missing"),
        (
            "extra",
            |t| drop(t.insert("model.layers.1.self_attn.bias".into(), t[Q].clone())),
            "unknown tensor model.layers.1.self_attn.bias",
        ),
        ("a layer too many", |t| drop(t.insert(Q.replace(".1.", ".7."), t[Q].clone())), "unknown tensor model.layers.7"),
        ("transposed", |t| t.get_mut(Q).unwrap().shape.reverse(), "has shape [64, 128], expected [128, 64]"),
        ("half precision", |t| t.get_mut(Q).unwrap().dtype = Dtype::F16, "has type F16"),
        ("no final norm", |t| drop(t.remove("model.norm.weight")), "tensor model.norm.weight is missing"),
        (
            "no correction bias",
            |t| drop(t.remove("model.layers.1.mlp.gate.e_score_correction_bias")),
            "e_score_correction_bias is missing",
        ),
        (
            "another type of index key",
            |t| t.get_mut("model.layers.1.self_attn.indexer.k_proj.weight").unwrap().dtype = Dtype::I16,
            "I16",
        ),
        (
            "an expert less",
            |t| {
                let experts = t.get_mut("model.layers.2.mlp.experts.down_proj").unwrap();
                experts.shape[0] -= 1;
                experts.data.truncate(experts.data.len() / 4 * 3);
            },
            "tensor model.layers.2.mlp.experts.down_proj has shape [3, 64, 32], expected [4, 64, 32]",
        ),
        (
            "a column less",
            |t| {
                let norm = t.get_mut("model.norm.weight").unwrap();
                norm.shape = vec![63];
                norm.data.truncate(126);
            },
            "tensor model.norm.weight has shape [63]",
        ),
    ];
    for (what, change, expected) in cases {
        let error = open_changed(change).expect_err(what);
        assert_eq!(error.kind(), ErrorKind::Input, "{what}");
        assert!(error.message().contains(expected) && error.help_line().is_some(), "{what}: {error}");
        // A missing tensor could have been in any file.
        assert!(expected.ends_with("is missing") || error.message().contains("/model.safetensors: "), "{what}: {error}");
    }
    open_changed(|_| ()).unwrap();
}

#[test]
fn f32_tensors_are_accepted_and_make_their_buffer_f32() {
    let checkpoint = open_changed(|tensors| {
        let tensor = tensors.get_mut("model.layers.0.self_attn.k_proj.weight").unwrap();
        tensor.data =
            tensor.data.chunks(2).flat_map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32().to_le_bytes()).collect();
        tensor.dtype = Dtype::F32;
    })
    .unwrap();
    let narrow = packed(&Checkpoint::open(&fixtures().join("m3-nano")).unwrap());
    let wide = packed(&checkpoint);
    for (weight, bytes) in &wide {
        if *weight != Weight::Layer(0, LayerWeight::Qkv) {
            assert_eq!(bytes, &narrow[weight], "{weight}");
            continue;
        }
        let wide: Vec<f32> = bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        let narrow: Vec<f32> = narrow[weight].chunks(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
        assert_eq!(wide, narrow);
    }
}

#[test]
fn vision_and_mtp_weights_are_left_alone() {
    let checkpoint = open_changed(|tensors| {
        let any = tensors["model.norm.weight"].clone();
        for name in ["vision_tower.patch.weight", "multi_modal_projector.w", "model.mtp.0.norm.weight"] {
            tensors.insert(name.into(), any.clone());
        }
    })
    .unwrap();
    assert_eq!(packed(&checkpoint), packed(&Checkpoint::open(&fixtures().join("m3-nano")).unwrap()));
}

/// Copies a fixture so that its files can be spoilt.
fn copy_of(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixtures().join(name)).unwrap() {
        let path = entry.unwrap().path();
        let to = dir.path().join(path.file_name().unwrap());
        std::fs::write(to, std::fs::read(&path).unwrap()).unwrap();
    }
    dir
}

#[test]
fn wrong_files_are_named() {
    const SECOND: &str = "model-00002-of-00002.safetensors";
    const INDEX: &str = "model.safetensors.index.json";
    type Spoil = fn(&Path);
    let cases: [(&str, &str, Spoil, &str); 13] = [
        ("m3-nano-published", "missing shard", |dir| std::fs::remove_file(dir.join(SECOND)).unwrap(), SECOND),
        ("m3-nano-published", "truncated shard", |dir| truncate(&dir.join(SECOND), 100_000), SECOND),
        ("m3-nano-published", "empty shard", |dir| truncate(&dir.join(SECOND), 0), SECOND),
        (
            "m3-nano-published",
            "index names a shard that is not there",
            |dir| edit(&dir.join(INDEX), SECOND, "model-00003-of-00003.safetensors"),
            "model-00003-of-00003.safetensors",
        ),
        ("m3-nano-published", "empty index", |dir| std::fs::write(dir.join(INDEX), "{\"weight_map\": {}}").unwrap(), INDEX),
        ("m3-nano-published", "no index", |dir| std::fs::remove_file(dir.join(INDEX)).unwrap(), "model.safetensors"),
        ("m3-nano", "truncated data", |dir| truncate(&dir.join("model.safetensors"), 350_000), "model.safetensors"),
        ("m3-nano-published", "no JSON", |dir| std::fs::write(dir.join(INDEX), "{").unwrap(), INDEX),
        ("m3-nano-published", "shard elsewhere", |dir| edit(&dir.join(INDEX), SECOND, "../x.safetensors"), "../x.safetensors"),
        (
            "m3-nano-published",
            "tensor in the wrong shard",
            |dir| {
                edit(
                    &dir.join(INDEX),
                    "language_model.model.norm.weight\": \"model-00002",
                    "language_model.model.norm.weight\": \"model-00001",
                )
            },
            "tensor language_model.model.norm.weight is here",
        ),
        (
            "m3-nano-published",
            "tensor only in the index",
            |dir| {
                edit(
                    &dir.join(INDEX),
                    "\"language_model.lm_head.weight\"",
                    "\"language_model.lm_tail.weight\": \"model-00001-of-00002.safetensors\", \"language_model.lm_head.weight\"",
                )
            },
            "tensor language_model.lm_tail.weight is missing",
        ),
        ("m3-nano", "no weights", |dir| std::fs::remove_file(dir.join("model.safetensors")).unwrap(), "model.safetensors"),
        ("m3-nano", "truncated header", |dir| truncate(&dir.join("model.safetensors"), 1000), "model.safetensors"),
    ];
    for (fixture, what, spoil, expected) in cases {
        let dir = copy_of(fixture);
        spoil(dir.path());
        let error = Checkpoint::open(dir.path()).expect_err(what);
        assert_eq!(error.kind(), ErrorKind::Input, "{what}");
        assert!(error.message().contains(expected) && error.help_line().is_some(), "{what}: {error}");
    }
    let error = Checkpoint::open(Path::new("/nonexistent/model")).unwrap_err();
    assert!(error.message().contains("/nonexistent/model: ") && error.help_line().is_some(), "{error}");
}

fn truncate(file: &Path, bytes: u64) {
    std::fs::OpenOptions::new().write(true).open(file).unwrap().set_len(bytes).unwrap();
}

fn edit(file: &Path, from: &str, to: &str) {
    let text = std::fs::read_to_string(file).unwrap();
    assert!(text.contains(from), "{from} is not in {}", file.display());
    std::fs::write(file, text.replace(from, to)).unwrap();
}

#[test]
fn random_checkpoints_open_and_repeat() {
    for name in ["nano", "tiny"] {
        let shape = make::named_shape(name).unwrap();
        let (a, b, c) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut heard = 0;
        let bytes = make::make_model(&shape, 5, a.path(), |done| heard = done).unwrap();
        assert_eq!(heard, bytes);
        make::make_model(&shape, 5, b.path(), |_| ()).unwrap();
        make::make_model(&shape, 6, c.path(), |_| ()).unwrap();
        let read = |dir: &tempfile::TempDir| std::fs::read(dir.path().join("model.safetensors")).unwrap();
        assert!(read(&a) == read(&b) && read(&a) != read(&c), "the seed alone decides");
        let checkpoint = Checkpoint::open(a.path()).unwrap();
        assert_eq!(checkpoint.shape(), &shape);
        assert_eq!(
            checkpoint.weights().iter().map(|w| w.shape.iter().product::<u64>()).sum::<u64>() * 2,
            bytes - router_biases(&shape) * 2
        );
        assert!(make::make_model(&shape, 5, a.path(), |_| ()).is_err(), "a model is never overwritten");
    }
    assert_eq!(make::named_shape("huge").unwrap_err().kind(), ErrorKind::Config);
}

#[test]
fn shards_hold_the_same_tensors() {
    let (one, many) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let shape = ModelShape::nano();
    let bytes = make::make_model(&shape, 5, one.path(), |_| ()).unwrap();
    let limit = 20_000;
    assert_eq!(make::make_model_in_shards(&shape, 5, many.path(), limit, |_| ()).unwrap(), bytes);
    assert_eq!(make::model_bytes(&shape), bytes);
    let [a, b] = [&one, &many].map(|dir| Checkpoint::open(dir.path()).unwrap());
    assert_eq!(packed(&a), packed(&b));
    let index = std::fs::read_to_string(many.path().join("model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_str(&index).unwrap();
    assert_eq!(index["metadata"]["total_size"], bytes);
    let mut files: Vec<&str> = index["weight_map"].as_object().unwrap().values().map(|file| file.as_str().unwrap()).collect();
    files.sort();
    files.dedup();
    assert!(files.len() > 3 && files[0] == format!("model-00001-of-{:05}.safetensors", files.len()), "{files:?}");
    for file in files {
        let bytes = std::fs::read(many.path().join(file)).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let held: usize = tensors.iter().map(|(_, view)| view.data().len()).sum();
        assert!(held <= limit as usize || tensors.len() == 1, "{file}: {held}");
    }
    assert!(make::make_model_in_shards(&shape, 5, many.path(), limit, |_| ()).is_err(), "a model is never overwritten");
}

#[test]
fn a_disk_without_the_room_is_found_out_first() {
    // 70 TB.
    let layers = vec![true; 600];
    let shape = ModelShape { sparse_attention: layers.clone(), moe: layers, experts: 1024, ..ModelShape::minimax_m3() };
    let dir = tempfile::tempdir().unwrap();
    let error = make::make_model(&shape, 5, dir.path(), |_| panic!("nothing is written")).unwrap_err();
    assert!(error.kind() == ErrorKind::Input && error.message().contains("the disk has"), "{error}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn the_slice_is_of_the_full_width() {
    let (slice, full) = (make::named_shape("m3-slice").unwrap(), ModelShape::minimax_m3());
    assert_eq!(
        (slice.layers(), &slice.sparse_attention, &slice.moe),
        (4, &vec![false, false, true, true], &slice.sparse_attention)
    );
    assert_eq!(ModelShape { sparse_attention: full.sparse_attention.clone(), moe: full.moe.clone(), ..slice.clone() }, full);
    assert_eq!(make::model_bytes(&slice) >> 30, 33);
}

/// Elements that are stored in four bytes.
fn router_biases(shape: &ModelShape) -> u64 {
    shape.moe.iter().filter(|&&moe| moe).count() as u64 * u64::from(shape.experts)
}

#[test]
fn random_checkpoints_look_like_the_recorded_ones() {
    for (name, fixture) in [("nano", "m3-nano"), ("tiny", "m3-tiny")] {
        let dir = tempfile::tempdir().unwrap();
        make::make_model(&make::named_shape(name).unwrap(), 1, dir.path(), |_| ()).unwrap();
        let (ours, theirs) = (Tensors::checkpoint(dir.path()), Tensors::checkpoint(&fixtures().join(fixture)));
        let sorted = |tensors: &Tensors| {
            let mut names: Vec<String> = tensors.names().map(String::from).collect();
            names.sort();
            names
        };
        assert_eq!(sorted(&ours), sorted(&theirs));
        for tensor in ours.names() {
            assert_eq!(ours.shape(tensor), theirs.shape(tensor), "{tensor}");
            let deviation = |t: &Tensors| (t.get(tensor).iter().map(|x| x * x).sum::<f64>() / t.get(tensor).len() as f64).sqrt();
            let ratio = deviation(&ours) / deviation(&theirs);
            assert!(theirs.get(tensor).len() < 512 || (0.9..1.1).contains(&ratio), "{tensor}: {ratio}");
        }
        let config = |dir: &Path| -> serde_json::Map<String, serde_json::Value> {
            let text = std::fs::read_to_string(dir.join("config.json")).unwrap();
            serde_json::from_str(&text).unwrap()
        };
        let (ours, mut theirs) = (config(dir.path()), config(&fixtures().join(fixture)));
        theirs.remove("transformers_version");
        for (key, value) in &theirs {
            assert_eq!(ours.get(key), Some(value), "{key}");
        }
    }
}
