// The score kernels: the largest dot product of each visible block (msa-spec section 3).
//
// One function per element type and shape computes the score of (row, head, block) for decode and prefill and all shards: `Matrix`
// for the contract's shape (E4M3FN, 128 channels, 128 tokens a block), `Lanes` for every other. A score depends on that row's
// query and the block's visible keys alone; `Lanes` gives the CPU op's bits, `Matrix` sums as the matrix instruction does. NaN
// products are skipped; a block of nothing else, or whose table entry is no cache block, scores minus infinity.
#include "cell.h"
#include "fp8_tile.h"
#include "reduce.h"

constexpr float INIT_SENTINEL = 1e30f, LOCAL_SENTINEL = 1e29f;
// Rows of a run at most: query lengths and prefill tiles above it are scored in several.
constexpr u32 RUN_ROWS = 64;

// Consecutive rows of one sequence, and where their scores go.
struct Run {
    // [rows][heads][dim], rows `query_row` elements apart.
    const void* query;
    u32 query_row;
    const void* keys;
    // This sequence's row of the block table.
    const i32* table;
    float* score;
    u64 score_plane;
    u32 score_width, table_width, cache_blocks;
    u32 rows, heads, dim, block_size, init_blocks, local_blocks, rank, world;

    DEVICE u32 pairs() const { return rows * heads; }
    // The sentinel of a block that a row of causal length `len` must select; local wins over init. Else 0.
    DEVICE float forced(u32 block, u32 len) const {
        const u32 blocks = ceil_div(len, block_size);
        if (block >= blocks) return 0.0f;
        if (block + local_blocks >= blocks) return LOCAL_SENTINEL;
        return block < init_blocks ? INIT_SENTINEL : 0.0f;
    }
    // Tokens of a block that are scored for a row: none of a forced block.
    DEVICE u32 visible(u32 block, u32 len) const {
        if (forced(block, len) != 0.0f || len <= block * block_size) return 0;
        return min_u32(len - block * block_size, block_size);
    }
    // The cache block of a block, -1 if the table holds none there.
    DEVICE i32 cache_block(u32 block) const {
        const i32 id = block < table_width ? table[block] : -1;
        return id >= 0 && (u32)id < cache_blocks ? id : -1;
    }
    DEVICE void put(u32 pair, u32 local, u32 len, float best) const {
        const float sentinel = forced(local * world + rank, len);
        score[(pair % heads) * score_plane + (u64)(pair / heads) * score_width + local] = sentinel != 0.0f ? sentinel : best;
    }
};

// Orders floats as integers; the smallest is minus infinity's.
DEVICE u32 ordered(float x) { return bits(x) >> 31 ? ~bits(x) : bits(x) | 0x80000000u; }
DEVICE float unordered(u32 x) { return from_bits(x >> 31 ? x ^ 0x80000000u : ~x); }

// Any shape: a lane takes a token of a window of blocks and dots it with a few queries in the CPU op's order.
template <class T> struct Lanes {
    // (row, head) pairs that share a pass over the keys, their channels in LDS, and blocks of a window.
    static constexpr u32 PAIRS = 4, DIM_MOST = 1024, WINDOW = 16;

    struct Lds {
        alignas(16) float query[PAIRS * DIM_MOST];
        u32 best[WINDOW * PAIRS];
    };

    DEVICE static void run(const Run& r, const u32* lens, u32 first, u32 end, Lds& lds) {
        const u32 dim = r.dim, window = max_u32(1, min_u32(WINDOW, WORKGROUP / r.block_size));
        if (dim > DIM_MOST) return;
        for (u32 pair = 0; pair < r.pairs(); pair += PAIRS) {
            const u32 pairs = min_u32(PAIRS, r.pairs() - pair);
            barrier();
            for (u32 at = lane(); at < PAIRS * dim; at += WORKGROUP) {
                const u32 p = at / dim, d = at % dim, number = pair + min_u32(p, pairs - 1);
                const u64 from = (u64)(number / r.heads) * r.query_row + (number % r.heads) * dim + d;
                lds.query[p * DIM_MOST + d] = T::decode(typed<T>(r.query)[from]);
            }
            for (u32 at = first; at < end; at += window) {
                const u32 blocks = min_u32(window, end - at);
                barrier();
                if (lane() < WINDOW * PAIRS) lds.best[lane()] = ordered(-infinity());
                barrier();
                for (u32 token = lane(); token < blocks * r.block_size; token += WORKGROUP) {
                    const u32 in_window = token / r.block_size, t = token % r.block_size;
                    const u32 block = (at + in_window) * r.world + r.rank;
                    u32 most = 0;
                    for (u32 p = 0; p < pairs; p++) most = max_u32(most, r.visible(block, lens[(pair + p) / r.heads]));
                    const i32 id = t < most ? r.cache_block(block) : -1;
                    if (id < 0) continue;
                    float dots[PAIRS];
                    score(typed<T>(r.keys) + ((u64)(u32)id * r.block_size + t) * dim, dim, lds.query, dots);
                    UNROLL for (u32 p = 0; p < PAIRS; p++) {
                        const bool seen = p < pairs && t < r.visible(block, lens[(pair + min_u32(p, pairs - 1)) / r.heads]);
                        if (seen && !is_nan(dots[p])) lds_max(&lds.best[in_window * PAIRS + p], ordered(dots[p]));
                    }
                }
                barrier();
                for (u32 i = lane(); i < blocks * pairs; i += WORKGROUP) {
                    const u32 p = i % pairs, in_window = i / pairs;
                    const float best = unordered(lds.best[in_window * PAIRS + p]);
                    r.put(pair + p, at + in_window, lens[(pair + p) / r.heads], best);
                }
            }
        }
    }

    // Lane c % 8 of each sum takes channel c; then the tree.
    DEVICE static void score(const typename T::Raw* row, u32 dim, const float* query, float* dots) {
        constexpr u32 STEP = per_chunk<T> > 8 ? per_chunk<T> : 8;
        float sums[PAIRS][8];
        UNROLL for (u32 p = 0; p < PAIRS; p++) {
            UNROLL for (u32 l = 0; l < 8; l++) sums[p][l] = 0.0f;
        }
        const bool chunks = dim % per_chunk<T> == 0;
        for (u32 c = 0; c < dim; c += STEP) {
            float key[STEP];
            if (chunks && c + STEP <= dim) {
                UNROLL for (u32 i = 0; i < STEP; i += per_chunk<T>) T::widen(*(const Chunk*)(row + c + i), key + i);
            } else {
                UNROLL for (u32 i = 0; i < STEP; i++) key[i] = c + i < dim ? T::decode(row[c + i]) : 0.0f;
            }
            UNROLL for (u32 p = 0; p < PAIRS; p++) {
                UNROLL for (u32 i = 0; i < STEP; i++) {
                    const float q = c + i < dim ? query[p * DIM_MOST + c + i] : 0.0f;
                    sums[p][i % 8] = fused(q, key[i], sums[p][i % 8]);
                }
            }
        }
        UNROLL for (u32 p = 0; p < PAIRS; p++) dots[p] = tree8(sums[p]);
    }
};

#if FP8_MATRIX != FP8_MATRIX_NONE

// The contract's shape: a wave takes a block, or a part of one where there are fewer blocks than waves, tile by tile.
struct Matrix {
    struct Lds {
        float best[WORKGROUP / WAVE_LANES_LEAST][Fp8Tile::PAIRS];
    };

    DEVICE static bool fits(const Run& r) { return r.dim == 128 && r.block_size == 128; }

    DEVICE static void run(const Run& any, const u32* lens, u32 first, u32 end, Lds& lds) {
        // The shape is the contract's: constants here spare divisions.
        Run r = any;
        r.dim = r.block_size = 128;
        // Waves that share a block, a power of two; each takes its part of the tiles.
        u32 shared = waves();
        while (shared > 1 && (end - first) * shared > waves()) shared /= 2;
        const u32 part = wave() % shared, step = waves() / shared, share = 128 / Fp8Tile::TOKENS / shared;
        for (u32 pair = 0; pair < r.pairs(); pair += Fp8Tile::PAIRS) {
            const u32 pairs = min_u32(Fp8Tile::PAIRS, r.pairs() - pair);
            Fp8Tile tile;
            tile.query([&](u32 p) -> const u8* {
                if (p >= pairs) return nullptr;
                const u32 number = pair + p;
                return (const u8*)r.query + (u64)(number / r.heads) * r.query_row + (number % r.heads) * 128;
            }, pairs);
            // Causal length of each slot's row, 0 for a slot without a pair, and where its scores go.
            u32 len[Fp8Tile::SLOTS];
            float* to[Fp8Tile::SLOTS];
            UNROLL for (u32 s = 0; s < Fp8Tile::SLOTS; s++) {
                const u32 p = tile.pair(s), number = pair + min_u32(p, pairs - 1);
                len[s] = p < pairs ? lens[number / r.heads] : 0;
                to[s] = r.score + (number % r.heads) * r.score_plane + (u64)(number / r.heads) * r.score_width;
            }
            for (u32 from = first; from < end; from += step) {
                const u32 at = from + wave() / shared, block = at * r.world + r.rank;
                tile.start();
                if (at < end) {
                    u32 most = 0, visible[Fp8Tile::SLOTS];
                    UNROLL for (u32 s = 0; s < Fp8Tile::SLOTS; s++) {
                        visible[s] = r.visible(block, len[s]);
                        most = max_u32(most, visible[s]);
                    }
                    // Lanes hold different pairs; the tiles to read are those of the longest.
                    most = wave_reduce(most, Most());
                    const i32 id = most > 0 ? r.cache_block(block) : -1;
                    if (id >= 0) {
                        const u8* keys = (const u8*)r.keys + (u64)(u32)id * (128 * 128);
                        const u32 last = min_u32((part + 1) * share, ceil_div(most, Fp8Tile::TOKENS));
                        tile.tiles(keys, part * share, last, visible);
                    }
                }
                tile.reduce();
                if (shared > 1) {
                    barrier();
                    UNROLL for (u32 s = 0; s < Fp8Tile::SLOTS; s++) {
                        if (tile.owner()) lds.best[wave()][tile.pair(s)] = tile.best[s];
                    }
                    barrier();
                    for (u32 w = 1; part == 0 && w < shared; w++) {
                        UNROLL for (u32 s = 0; s < Fp8Tile::SLOTS; s++) {
                            tile.best[s] = max_num(tile.best[s], lds.best[wave() + w][tile.pair(s)]);
                        }
                    }
                }
                if (at < end && part == 0 && tile.owner()) {
                    UNROLL for (u32 s = 0; s < Fp8Tile::SLOTS; s++) {
                        const float sentinel = r.forced(block, len[s]);
                        if (tile.pair(s) < pairs) to[s][at] = sentinel != 0.0f ? sentinel : tile.best[s];
                    }
                }
            }
        }
    }
};

#else

// No such instruction: the lanes' version takes over.
struct Matrix : Lanes<F8E4M3> {
    DEVICE static bool fits(const Run&) { return true; }
};

#endif

union ScoreLds {
    Matrix::Lds matrix;
    Lanes<F32>::Lds lanes;
};

// Scores blocks `first`..`end` of the shard for every pair of the run.
DEVICE void score_run(const Run& r, u32 dtype, const u32* lens, u32 first, u32 end, u8* lds) {
    if (first >= end || r.pairs() == 0) return;
    if (dtype == DTYPE_FP8_E4M3 && Matrix::fits(r)) Matrix::run(r, lens, first, end, *(Matrix::Lds*)lds);
    else WITH_CELL(dtype, T, Lanes<T>::run(r, lens, first, end, *(typename Lanes<T>::Lds*)lds));
}

template <class F> DEVICE void decode(const ScoreDecodeArgs& a, F score) {
    LDS u32 lens[RUN_ROWS];
    const u32 sequence = group(1);
    if (sequence >= a.sequences) return;
    const i32 kv_len = a.seq_len[sequence], slot = a.seq_slot[sequence];
    if (kv_len <= 0 || slot < 0 || (u32)slot >= a.slots) return;
    const u32 world = max_u32(a.world, 1);
    // The last row sees the whole sequence, so its blocks are the request's.
    const u32 blocks = ceil_div((u32)kv_len, a.block_size);
    const u32 local = min_u32(blocks > a.rank ? ceil_div(blocks - a.rank, world) : 0, a.score_width);
    const u32 per = ceil_div(local, groups(0));
    const u32 first = group(0) * per, end = min_u32(first + per, local);
    if (first >= end) return;
    for (u32 row = 0; row < a.query_len; row += RUN_ROWS) {
        const u32 rows = min_u32(RUN_ROWS, a.query_len - row);
        barrier();
        if (lane() < rows) {
            const i64 len = (i64)kv_len - (i64)a.query_len + (i64)(row + lane()) + 1;
            lens[lane()] = len > 0 ? (u32)len : 0;
        }
        barrier();
        const u32 first_row = sequence * a.query_len + row, width = a.heads * a.dim;
        const u32 bytes = a.index_dtype == DTYPE_F32 ? 4 : a.index_dtype == DTYPE_BF16 ? 2 : 1;
        const Run r = {
            (const u8*)a.index_q + (u64)first_row * width * bytes,
            width,
            a.index_cache,
            a.block_table + (u64)slot * a.table_width,
            a.score + (u64)first_row * a.score_width,
            (u64)a.score_rows * a.score_width,
            a.score_width, a.table_width, a.cache_blocks,
            rows, a.heads, a.dim, a.block_size, a.init_blocks, a.local_blocks, a.rank, world,
        };
        score(r, lens, first, end);
    }
}

KERNEL void score_decode(const ScoreDecodeArgs a) {
    alignas(16) LDS u8 lds[sizeof(ScoreLds)];
    decode(a, [&](const Run& r, const u32* lens, u32 first, u32 end) { score_run(r, a.index_dtype, lens, first, end, lds); });
}

KERNEL_SHARING(2) void score_decode_m3(const ScoreDecodeArgs a) {
    LDS Matrix::Lds lds;
    decode(a, [&](const Run& r, const u32* lens, u32 first, u32 end) {
        if (a.index_dtype == DTYPE_FP8_E4M3 && Matrix::fits(r)) Matrix::run(r, lens, first, end, lds);
    });
}

KERNEL void score_prefill(const ScorePrefillArgs a) {
    alignas(16) LDS u8 lds[sizeof(ScoreLds)];
    LDS u32 lens[RUN_ROWS];
    const u32 tile_end = min_u32((group(1) + 1) * a.tile_rows, a.rows);
    const u32 bytes = a.index_dtype == DTYPE_F32 ? 4 : a.index_dtype == DTYPE_BF16 ? 2 : 1;
    u32 first_row = group(1) * a.tile_rows;
    while (first_row < tile_end) {
        // The rows of one sequence follow each other; a pad row is a run of its own that scores nothing. Blocks up to the
        // longest row's are written for all rows of a run, so it may not be cut short of the tile's end: `RUN_ROWS` rows share
        // LDS, the longest is that of the whole run.
        const i32 slot = a.row_slot[first_row];
        u32 last = first_row, longest = 0;
        do {
            const i32 len = a.row_len[last];
            longest = max_u32(longest, len > 0 ? (u32)len : 0);
            last++;
        } while (last < tile_end && a.row_slot[last] == slot && a.row_len[last] > 0 && a.row_len[first_row] > 0);
        if (longest > 0 && slot >= 0 && (u32)slot < a.slots) {
            const u32 blocks = min_u32(ceil_div(longest, a.block_size), a.score_width);
            const u32 per = ceil_div(blocks, groups(0));
            const u32 first = group(0) * per, end = min_u32(first + per, blocks);
            for (u32 row = first_row; row < last; row += RUN_ROWS) {
                const u32 rows = min_u32(RUN_ROWS, last - row);
                barrier();
                if (lane() < rows) {
                    const i32 len = a.row_len[row + lane()];
                    lens[lane()] = len > 0 ? (u32)len : 0;
                }
                barrier();
                const u32 width = a.q_heads_stride * a.dim;
                const Run r = {
                    (const u8*)a.index_q + ((u64)row * width + a.first_head * a.dim) * bytes,
                    width,
                    a.index_cache,
                    a.block_table + (u64)slot * a.table_width,
                    a.score + (u64)row * a.score_width,
                    (u64)a.score_rows * a.score_width,
                    a.score_width, a.table_width, a.cache_blocks,
                    rows, a.heads, a.dim, a.block_size, a.init_blocks, a.local_blocks, 0, 1,
                };
                score_run(r, a.index_dtype, lens, first, end, lds);
            }
        }
        first_row = last;
    }
}
