//! `topk_emit`: the best blocks of a row and the page table its attend reads (`msa-spec` section 4).

use super::view::{Bound, View, ViewMut};
use crate::hal::Workgroup;
use crate::kernels::msa::{PAGE_TOKENS, TopkEmitArgs};

/// Keys that one pass over the scores keeps; a larger top-k takes several passes.
const KEPT: usize = 128;

/// Selects and emits for one (row, head).
pub fn topk_emit(args: &Bound<'_, TopkEmitArgs>, workgroup: &mut Workgroup<'_>) {
    let [row, head, _] = workgroup.id;
    if row >= args.rows || head >= args.heads {
        return;
    }
    let (row, head, topk) = (row as usize, head as usize, args.topk as usize);
    let len = args.read::<i32>(|a| &a.row_len).get(row).max(0) as usize;
    let blocks = len.div_ceil(args.block_size as usize).min(args.score_width as usize);
    let plane = head * args.score_rows as usize + row;
    let scores = args.read::<f32>(|a| &a.score).slice(plane * args.score_width as usize, blocks);
    let mut topk_idx = args.write::<i32>(|a| &a.topk_idx);
    let selected = topk_idx.slice_mut((head * args.topk_rows as usize + row) * topk, topk);
    select(scores, selected);
    emission!(args, args.heads).emit(row, head, len, selected);
}

/// The order of scores: descending keys. NaN counts as minus infinity, +0 comes before -0, the higher block wins a tie.
pub fn key(score: f32, block: u32) -> u64 {
    let bits = if score.is_nan() { f32::NEG_INFINITY.to_bits() } else { score.to_bits() };
    let ordered = if bits >> 31 == 0 { bits ^ 0x8000_0000 } else { !bits };
    u64::from(ordered) << 32 | u64::from(block)
}

/// Fills `selected` with the blocks of the largest keys, largest first, then -1.
pub(super) fn select(scores: &[f32], selected: &mut [i32]) {
    let mut below = u64::MAX;
    for part in selected.chunks_mut(KEPT) {
        let mut kept = [0; KEPT];
        let kept = &mut kept[..part.len()];
        // Most scores are below the smallest kept key: one compare each.
        for (block, &score) in scores.iter().enumerate() {
            let key = key(score, block as u32);
            if key > kept[kept.len() - 1] && key < below {
                insert(kept, key);
            }
        }
        // No key is 0: the smallest ordered score is that of minus infinity, 0x007f_ffff.
        for (to, &key) in part.iter_mut().zip(kept.iter()) {
            *to = if key == 0 { -1 } else { key as u32 as i32 };
        }
        below = kept[kept.len() - 1];
    }
}

/// Puts a key into a descending list in place of its smallest.
pub(super) fn insert(kept: &mut [u64], key: u64) {
    let at = kept.partition_point(|&other| other > key);
    kept.copy_within(at..kept.len() - 1, at + 1);
    kept[at] = key;
}

/// Where a selection is emitted to: the page tables of a launch and the block table they are made from.
pub(super) struct Emission<'a> {
    pub page_table: ViewMut<'a, i32>,
    pub page_len: ViewMut<'a, i32>,
    pub row_slot: View<'a, i32>,
    pub block_table: View<'a, i32>,
    pub heads: usize,
    pub kv_heads: usize,
    pub topk: usize,
    pub block_size: usize,
    pub slots: usize,
    pub table_width: usize,
    pub cache_blocks: u32,
}

/// The [`Emission`] of a launch's arguments, `$heads` index heads of which it emits.
macro_rules! emission {
    ($args:expr, $heads:expr) => {
        $crate::kernels::cpu::topk::Emission {
            page_table: $args.write(|a| &a.page_table),
            page_len: $args.write(|a| &a.page_len),
            row_slot: $args.read(|a| &a.row_slot),
            block_table: $args.read(|a| &a.block_table),
            heads: $heads as usize,
            kv_heads: $args.kv_heads as usize,
            topk: $args.topk as usize,
            block_size: $args.block_size as usize,
            slots: $args.slots as usize,
            table_width: $args.table_width as usize,
            cache_blocks: $args.cache_blocks,
        }
    };
}
pub(super) use emission;

impl Emission<'_> {
    /// Writes the page table rows of the KV heads that share `head`'s selection (section 4.3).
    pub fn emit(&mut self, row: usize, head: usize, len: usize, selected: &[i32]) {
        let block_size = self.block_size;
        let pages = block_size / PAGE_TOKENS as usize;
        let (kv_heads, group) = (self.kv_heads, self.kv_heads / self.heads);
        let own = len.saturating_sub(1) / block_size;
        let full = selected.iter().filter(|&&block| block >= 0 && (block as usize) < own).count();
        let tail = len > 0 && selected.iter().any(|&block| block >= 0 && block as usize == own);
        let slot = if len > 0 { self.row_slot.get(row) } else { 0 };
        let emitted = selected.iter().map(|&block| block as usize).filter(|&block| block < own).chain(tail.then_some(own));
        for k in head * group..(head + 1) * group {
            let width = self.topk * pages;
            let first = (row * kv_heads + k) * width;
            let mut end = first;
            for block in emitted.clone() {
                let base = self.cache_block(slot, block).map(|id| 2 * pages as i32 * id * kv_heads as i32 + k as i32);
                for (j, to) in self.page_table.slice_mut(end, pages).iter_mut().enumerate() {
                    // The attend skips -1: a table entry that is no cache block is never followed.
                    *to = base.map_or(-1, |base| base + (j * kv_heads) as i32);
                }
                end += pages;
            }
            self.page_table.slice_mut(end, first + width - end).fill(0);
            let tokens = if tail { full * block_size + len - own * block_size } else { (full * block_size).min(len) };
            self.page_len.set(row * kv_heads + k, tokens as i32);
        }
    }

    /// The cache block of a sequence's block; `None` if the table holds none there.
    fn cache_block(&self, slot: i32, block: usize) -> Option<i32> {
        let inside = slot >= 0 && (slot as usize) < self.slots && block < self.table_width;
        let id = if inside { self.block_table.get(slot as usize * self.table_width + block) } else { -1 };
        (id >= 0 && (id as u32) < self.cache_blocks).then_some(id)
    }
}
