//! `topk_emit` against a sort, the worked examples of section 4.3, and every edge of section 12.

use super::super::ops;
use super::{Rng, ptr, run};
use crate::kernels::msa::TopkEmitArgs;

struct Case {
    heads: usize,
    kv_heads: usize,
    topk: usize,
    block_size: usize,
    lens: Vec<i32>,
    slots: Vec<i32>,
    table: Vec<i32>,
    table_width: usize,
    cache_blocks: usize,
    score: Vec<f32>,
    width: usize,
}

struct Emitted {
    topk_idx: Vec<i32>,
    page_table: Vec<i32>,
    page_len: Vec<i32>,
}

impl Case {
    fn random(rng: &mut Rng, heads: usize, kv_heads: usize, topk: usize, block_size: usize, lens: &[i32]) -> Case {
        let most = lens.iter().map(|&len| (len as usize).div_ceil(block_size)).max().unwrap();
        let (table_width, width, cache_blocks) = (most + 1, most + 2, lens.len() * (most + 1));
        let table = rng.permutation(cache_blocks);
        let score = (0..heads * (lens.len() + 1) * width).map(|_| rng.normal()).collect();
        let slots = rng.permutation(lens.len());
        Case { heads, kv_heads, topk, block_size, lens: lens.to_vec(), slots, table, table_width, cache_blocks, score, width }
    }

    fn score(&mut self, head: usize, row: usize) -> &mut [f32] {
        let at = (head * (self.lens.len() + 1) + row) * self.width;
        &mut self.score[at..at + self.width]
    }

    fn emit(&mut self) -> Emitted {
        let rows = self.lens.len();
        let pages = self.topk * self.block_size / 16;
        let mut out = Emitted {
            topk_idx: vec![-7; self.heads * (rows + 2) * self.topk],
            page_table: vec![-7; rows * self.kv_heads * pages],
            page_len: vec![-7; rows * self.kv_heads],
        };
        let args = TopkEmitArgs {
            score: ptr(&mut self.score),
            row_slot: ptr(&mut self.slots),
            row_len: ptr(&mut self.lens),
            block_table: ptr(&mut self.table),
            topk_idx: ptr(&mut out.topk_idx),
            page_table: ptr(&mut out.page_table),
            page_len: ptr(&mut out.page_len),
            rows: rows as u32,
            heads: self.heads as u32,
            kv_heads: self.kv_heads as u32,
            topk: self.topk as u32,
            block_size: self.block_size as u32,
            score_rows: rows as u32 + 1,
            score_width: self.width as u32,
            topk_rows: rows as u32 + 2,
            slots: (self.table.len() / self.table_width) as u32,
            table_width: self.table_width as u32,
            cache_blocks: self.cache_blocks as u32,
            reserved: 0,
        };
        run(ops::topk_emit, [rows as u32, self.heads as u32, 1], &args);
        out
    }

    fn selected<'a>(&self, out: &'a Emitted, head: usize, row: usize) -> &'a [i32] {
        let at = (head * (self.lens.len() + 2) + row) * self.topk;
        &out.topk_idx[at..at + self.topk]
    }

    /// Sections 4.2 and 4.3 by sorting and listing.
    fn check(&mut self) {
        let out = self.emit();
        let (rows, heads) = (self.lens.len(), self.heads);
        for (row, head) in (0..rows).flat_map(|row| (0..heads).map(move |head| (row, head))) {
            let len = self.lens[row].max(0) as usize;
            let scores = self.score(head, row).to_vec();
            let mut order: Vec<usize> = (0..len.div_ceil(self.block_size)).collect();
            let value = |b: usize| if scores[b].is_nan() { f32::NEG_INFINITY } else { scores[b] };
            order.sort_by(|&a, &b| value(b).total_cmp(&value(a)).then(b.cmp(&a)));
            order.truncate(self.topk);
            let mut expected: Vec<i32> = order.iter().map(|&b| b as i32).collect();
            expected.resize(self.topk, -1);
            assert_eq!(self.selected(&out, head, row), expected, "row {row} head {head}");

            let own = len.saturating_sub(1) / self.block_size;
            let tail = order.contains(&own) && len > 0;
            let mut blocks: Vec<usize> = order.iter().copied().filter(|&b| b < own).collect();
            let full = blocks.len();
            if tail {
                blocks.push(own);
            }
            let tokens = full * self.block_size + if tail { len - own * self.block_size } else { 0 };
            let (group, pages) = (self.kv_heads / self.heads, self.block_size / 16);
            for k in head * group..(head + 1) * group {
                let mut ids: Vec<i32> = Vec::new();
                for &b in &blocks {
                    let id = self.table[self.slots[row] as usize * self.table_width + b] as usize;
                    ids.extend((0..pages).map(|j| ((2 * pages * id + j) * self.kv_heads + k) as i32));
                }
                ids.resize(self.topk * pages, 0);
                let at = row * self.kv_heads + k;
                assert_eq!(&out.page_table[at * ids.len()..(at + 1) * ids.len()], &ids, "row {row} kv head {k}");
                assert_eq!(out.page_len[at], tokens as i32, "row {row} kv head {k}");
            }
        }
        // Rows past this step's are another's.
        assert!(
            (0..self.heads)
                .all(|h| out.topk_idx[(h * (rows + 2) + rows) * self.topk..][..2 * self.topk].iter().all(|&x| x == -7))
        );
    }
}

const LENS: [i32; 9] = [0, 1, 127, 128, 129, 2048, 2049, 5000, 12800];

#[test]
fn random_rows_match_a_sort() {
    let mut rng = Rng::seeded("topk");
    for (heads, kv_heads) in [(1, 1), (4, 4), (1, 4), (2, 4), (2, 2), (3, 6)] {
        Case::random(&mut rng, heads, kv_heads, 16, 128, &LENS).check();
    }
    for (topk, block_size) in [(1, 16), (4, 32), (64, 64), (200, 16), (300, 16)] {
        Case::random(&mut rng, 2, 2, topk, block_size, &[0, 1, 40, 1000, 5000, 5001]).check();
    }
}

#[test]
fn ties_zeros_nan_and_infinities_are_ordered() {
    let mut rng = Rng::seeded("topk ties");
    let values = [0.0, -0.0, f32::NAN, -f32::NAN, f32::NEG_INFINITY, f32::INFINITY, 1.0, 1e30, 1e29, -1e30];
    for _ in 0..50 {
        let mut case = Case::random(&mut rng, 2, 2, 16, 128, &LENS);
        for score in &mut case.score {
            *score = values[rng.below(values.len())];
        }
        case.check();
    }
    // All tied: the highest ids, descending. All minus infinity: still selected.
    for value in [0.5, f32::NEG_INFINITY, f32::NAN] {
        let mut case = Case::random(&mut rng, 1, 1, 16, 128, &[12800, 300]);
        case.score.fill(value);
        let out = case.emit();
        assert_eq!(case.selected(&out, 0, 0), (84..100).rev().collect::<Vec<i32>>());
        assert_eq!(case.selected(&out, 0, 1)[..4], [2, 1, 0, -1]);
    }
}

#[test]
fn the_worked_example_of_the_specification() {
    let mut rng = Rng::seeded("topk example");
    let mut case = Case::random(&mut rng, 1, 1, 16, 128, &[257]);
    case.table = vec![1, 3, 5, 0];
    (case.table_width, case.cache_blocks) = (4, 6);
    case.score(0, 0)[..3].copy_from_slice(&[1.0, 2.0, 3.0]);
    let out = case.emit();
    let expected: Vec<i32> = (48..56).chain(16..24).chain(80..88).collect();
    assert_eq!(out.page_table[..24], expected);
    assert!(out.page_table[24..].iter().all(|&id| id == 0));
    assert_eq!(out.page_len, [257]);
}

#[test]
fn an_unselected_tail_is_left_out() {
    let mut rng = Rng::seeded("topk tail");
    let mut case = Case::random(&mut rng, 1, 2, 2, 128, &[700]);
    case.score(0, 0)[..6].copy_from_slice(&[1.0, 5.0, 2.0, 4.0, 3.0, -1.0]);
    case.check();
    assert_eq!(case.emit().page_len, [256, 256]);
}

#[test]
fn tables_are_not_trusted_and_empty_rows_read_none() {
    let mut rng = Rng::seeded("topk tables");
    let mut case = Case::random(&mut rng, 1, 1, 16, 128, &[300, 0]);
    case.slots[1] = 77;
    let row = case.slots[0] as usize * case.table_width;
    case.table[row] = -1;
    case.table[row + 1] = case.cache_blocks as i32;
    let out = case.emit();
    let bad = out.page_table[..24].iter().filter(|&&id| id == -1).count();
    assert_eq!(bad, 16);
    assert!(out.page_table[128..].iter().all(|&id| id == 0));
    assert_eq!(out.page_len, [300, 0]);
}
