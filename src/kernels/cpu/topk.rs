//! `topk_emit`: the best blocks of a row and the page table its attend reads (`msa-spec` section 4).

use super::view::{Bound, View};
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
    emit(args, row, head, len, selected);
}

/// The order of scores: descending keys. NaN counts as minus infinity, +0 comes before -0, the higher block wins a tie.
pub fn key(score: f32, block: u32) -> u64 {
    let bits = if score.is_nan() { f32::NEG_INFINITY.to_bits() } else { score.to_bits() };
    let ordered = if bits >> 31 == 0 { bits ^ 0x8000_0000 } else { !bits };
    u64::from(ordered) << 32 | u64::from(block)
}

/// Fills `selected` with the blocks of the largest keys, largest first, then -1.
fn select(scores: &[f32], selected: &mut [i32]) {
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

fn insert(kept: &mut [u64], key: u64) {
    let at = kept.partition_point(|&other| other > key);
    kept.copy_within(at..kept.len() - 1, at + 1);
    kept[at] = key;
}

/// Writes the page table rows of the KV heads that share `head`'s selection (section 4.3).
fn emit(args: &Bound<'_, TopkEmitArgs>, row: usize, head: usize, len: usize, selected: &[i32]) {
    let block_size = args.block_size as usize;
    let pages = block_size / PAGE_TOKENS as usize;
    let (kv_heads, group) = (args.kv_heads as usize, (args.kv_heads / args.heads) as usize);
    let mut page_table = args.write::<i32>(|a| &a.page_table);
    let mut page_len = args.write::<i32>(|a| &a.page_len);
    let own = len.saturating_sub(1) / block_size;
    let full = selected.iter().filter(|&&block| block >= 0 && (block as usize) < own).count();
    let tail = len > 0 && selected.iter().any(|&block| block >= 0 && block as usize == own);
    let slot = if len > 0 { args.read::<i32>(|a| &a.row_slot).get(row) } else { 0 };
    let table: View<'_, i32> = args.read(|a| &a.block_table);
    for k in head * group..(head + 1) * group {
        let width = args.topk as usize * pages;
        let out = page_table.slice_mut((row * kv_heads + k) * width, width);
        let mut emitted = 0;
        let mut put = |block: usize| {
            let base = cache_block(args, &table, slot, block).map(|id| 2 * pages as i32 * id * kv_heads as i32 + k as i32);
            for (j, to) in out[emitted * pages..(emitted + 1) * pages].iter_mut().enumerate() {
                // The attend skips -1: a table entry that is no cache block is never followed.
                *to = base.map_or(-1, |base| base + (j * kv_heads) as i32);
            }
            emitted += 1;
        };
        selected.iter().filter(|&&block| block >= 0 && (block as usize) < own).for_each(|&block| put(block as usize));
        if tail {
            put(own);
        }
        out[emitted * pages..].fill(0);
        let tokens = if tail { full * block_size + len - own * block_size } else { (full * block_size).min(len) };
        page_len.set(row * kv_heads + k, tokens as i32);
    }
}

/// The cache block of a sequence's block; `None` if the table holds none there.
fn cache_block(args: &TopkEmitArgs, table: &View<'_, i32>, slot: i32, block: usize) -> Option<i32> {
    let inside = slot >= 0 && (slot as u32) < args.slots && block < args.table_width as usize;
    let id = if inside { table.get(slot as usize * args.table_width as usize + block) } else { -1 };
    (id >= 0 && (id as u32) < args.cache_blocks).then_some(id)
}
