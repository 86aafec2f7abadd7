// topk_emit: the best blocks of a row and the page table its attend reads.
#include "select.h"

KERNEL void topk_emit(const TopkEmitArgs a) {
    LDS SelectLds lds;
    // Full blocks before each lane's selected one, and which of a part is the sequence's own.
    LDS u32 scan[WORKGROUP];
    const u32 row = group(0), head = group(1);
    if (row >= a.rows || head >= a.heads) return;
    const i32 raw_len = a.row_len[row];
    const u32 len = raw_len > 0 ? (u32)raw_len : 0;
    const u32 blocks = min_u32(ceil_div(len, a.block_size), a.score_width);
    const float* score = a.score + ((u64)head * a.score_rows + row) * a.score_width;
    i32* selected = a.topk_idx + ((u64)head * a.topk_rows + row) * a.topk;
    u64 below = ~0ull;
    for (u32 first = 0; first < a.topk; first += PASS) {
        below = select(score, blocks, below, min_u32(PASS, a.topk - first), selected + first, lds);
    }
    barrier();
    emit(a, a.heads, row, head, len, selected, scan, lds);
}
