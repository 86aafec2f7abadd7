//! The page table that a selection must emit, by msa-spec section 4.3 read again: for rows whose selection is not the recorded
//! one to the letter, because two scores nearly tied.

use super::Selection;
use super::case::Case;
use crate::kernels::msa::PAGE_TOKENS;

/// The recorded table [rows * heads, pages]; rows of another selection than the recorded get what theirs must emit.
pub(super) fn expected(case: &Case, ids: &[i32], selections: &[Selection], recorded: &[i32], pages: usize) -> Vec<i32> {
    let (rows, heads, topk) = (case.row_count() as usize, case.heads as usize, case.topk as usize);
    let causal = case.causal();
    let mut expected = recorded.to_vec();
    for (plane_row, ids) in ids.chunks(topk).enumerate() {
        let (head, row) = (plane_row / rows, plane_row % rows);
        if selections[plane_row] != Selection::Equal {
            let to = &mut expected[(row * heads + head) * pages..][..pages];
            emit(case, ids, causal[row], head, to);
        }
    }
    expected
}

/// Full blocks in the order of the selection, then the block of the row itself; page ids of KV head `head`; zeros.
fn emit(case: &Case, ids: &[i32], (sequence, len): (u32, i32), head: usize, to: &mut [i32]) {
    let (heads, block_pages) = (case.heads as i32, (case.block_size / PAGE_TOKENS) as i32);
    let own = (len - 1) / case.block_size as i32;
    let full = ids.iter().filter(|&&id| (0..own).contains(&id));
    let blocks = full.chain(ids.iter().filter(|&&id| id == own && len > 0));
    let table = &case.attend_block_table[(sequence * case.table_width) as usize..];
    to.fill(0);
    for (slot, &block) in to.chunks_mut(block_pages as usize).zip(blocks) {
        let base = table[block as usize] * 2 * block_pages * heads + head as i32;
        slot.iter_mut().enumerate().for_each(|(page, id)| *id = base + page as i32 * heads);
    }
}
