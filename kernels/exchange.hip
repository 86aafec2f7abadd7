// agree and topk_exchange: what the ranks of a context-parallel group do inside a graph. Results are those of
// src/kernels/cpu/{agree,exchange}.rs; word, buffer and arguments: src/kernels/exchange.rs; protocol and proof: docs/cp.md.
//
// Each lane waits for a word of its own, and all for as long as one: so a wait for several ranks takes no longer than for one.
#include "select.h"
#include "state.h"

constexpr u32 HEAD_WORDS = 256, POISON_WORD = 0, AGREE_FIRST = 16, AGREE_WORDS = 4, RANKS_MAX = 8, TOPK_MAX = 64;
constexpr u32 PEER_TIMEOUT = 4, PEER_MISMATCH = 5, PEER_ENDED = 6, PEER_ABSENT = 7;
constexpr u32 NOBODY = ~0u;

// The words of a rank. Selects, as a pointer that is indexed would put the arguments into memory.
template <class Args> DEVICE u64* peer(const Args& a, u32 rank) {
    u64* words = a.peer0;
    if (rank == 1) words = a.peer1;
    if (rank == 2) words = a.peer2;
    if (rank == 3) words = a.peer3;
    if (rank == 4) words = a.peer4;
    if (rank == 5) words = a.peer5;
    if (rank == 6) words = a.peer6;
    if (rank == 7) words = a.peer7;
    return words;
}

// The error and first detail of the step, one word of its state.
DEVICE u64* error_word(u8* state) { return (u64*)&((StepState*)state)->error; }

// Writes the step's error unless there is one.
DEVICE void record(u8* state, u32 error, u32 first, u32 second, u32 third) {
    const u64 taken = load_acquire_system(error_word(state));
    if ((u32)taken != 0 || !exchange_system(error_word(state), taken, error | (u64)first << 32)) return;
    ((StepState*)state)->error_detail[1] = second;
    ((StepState*)state)->error_detail[2] = third;
}

// Ends the group: the first rank to do so stays named.
template <class Args> DEVICE void end_group(const Args& a) {
    for (u32 rank = 0; rank < a.world; rank++) exchange_system(peer(a, rank) + POISON_WORD, 0, (u64)a.rank + 1);
}

// A bounded wait of one lane: looks now and then for the end of the group and of its budget.
struct Patience {
    const u64* own;
    u64 until;
    u32 polls;
};

DEVICE Patience patience(const u64* own, u32 budget_us) { return Patience{own, nanoseconds() + (u64)budget_us * 1000, 0}; }

DEVICE bool is_over(Patience& p) {
    pause();
    if (++p.polls % 16 != 0) return false;
    return load_acquire_system(p.own + POISON_WORD) != 0 || nanoseconds() > p.until;
}

// A hash of a word: the finaliser of splitmix64.
DEVICE u64 mix(u64 x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

DEVICE u32 agree_first(u64 agreement, u32 source) { return AGREE_FIRST + ((u32)(agreement % 2) * RANKS_MAX + source) * AGREE_WORDS; }

struct Mismatch {
    u32 what, ours, theirs;
};

// The first thing in which two records differ, in the order of Differs::ALL; 0 if in none.
DEVICE Mismatch difference(u64 agreement, const u64 (&ours)[3], u64 found, const u64 (&theirs)[3]) {
    if ((u32)agreement != (u32)found) return Mismatch{6, (u32)agreement, (u32)found};
    if ((u32)ours[0] != (u32)theirs[0]) return Mismatch{1, (u32)ours[0], (u32)theirs[0]};
    if (ours[0] >> 32 != theirs[0] >> 32) return Mismatch{2, (u32)(ours[0] >> 32), (u32)(theirs[0] >> 32)};
    if ((u32)ours[1] != (u32)theirs[1]) return Mismatch{3, (u32)ours[1], (u32)theirs[1]};
    if (ours[1] >> 32 != theirs[1] >> 32) return Mismatch{4, (u32)(ours[1] >> 32), (u32)(theirs[1] >> 32)};
    if ((u32)ours[2] != (u32)theirs[2]) return Mismatch{5, (u32)ours[2], (u32)theirs[2]};
    return Mismatch{0, 0, 0};
}

KERNEL void agree(const AgreeArgs a) {
    LDS u64 sums[WORKGROUP / WAVE_LANES_LEAST], before[2];
    LDS u64 records[RANKS_MAX][AGREE_WORDS];
    StepState* state = (StepState*)a.state;
    if (lane() == 0) {
        before[0] = a.agreements[0];
        before[1] = state->error;
    }
    u64 batch = 0;
    for (u32 s = lane(); s < a.sequences; s += WORKGROUP) batch += mix((u64)(s + 1) << 32 | (u32)a.seq_len[s]);
    batch = workgroup_reduce(batch, sums, Add()) + mix(state->live_rows);
    const u64 agreement = before[0] + 1;
    const u64 ours[3] = {
        a.rows | (u64)a.query_len << 32,
        (state->sequence & 0xffffffffull) | (u64)(before[1] == 0 ? a.graph : ~a.graph) << 32,
        (batch ^ batch >> 32) & 0xffffffffull,
    };
    u64* own = peer(a, a.rank);
    if (lane() < a.world) {
        u64* to = peer(a, lane()) + agree_first(agreement, a.rank);
        for (u32 word = 0; word < 3; word++) store_release_system(to + word, ours[word]);
        store_release_system(to + 3, agreement);
    }
    if (lane() < a.world) {
        const u64* from = own + agree_first(agreement, lane());
        Patience wait = patience(own, a.budget_us);
        u64 found = load_acquire_system(from + 3);
        // Numbers start at 1: 0 is a rank that did not come.
        while (found < agreement) {
            if (is_over(wait)) {
                found = 0;
                break;
            }
            found = load_acquire_system(from + 3);
        }
        for (u32 word = 0; word < 3; word++) records[lane()][word] = load_acquire_system(from + word);
        records[lane()][3] = found;
    }
    barrier();
    if (lane() != 0) return;
    a.agreements[0] = agreement;
    bool failed = before[1] != 0;
    for (u32 rank = 0; rank < a.world; rank++) {
        const u64 found = records[rank][3];
        if (found == 0) {
            const u64 ended = load_acquire_system(own + POISON_WORD);
            if (ended != 0) {
                record(a.state, PEER_ENDED, (u32)ended - 1, 0, 0);
            } else {
                record(a.state, PEER_ABSENT, rank, (u32)agreement, (u32)state->sequence);
                end_group(a);
            }
            return;
        }
        const u64 theirs[3] = {records[rank][0], records[rank][1], records[rank][2]};
        const Mismatch found_other = difference(agreement, ours, found, theirs);
        if (!failed && found_other.what != 0) {
            record(a.state, PEER_MISMATCH, rank | found_other.what << 16, found_other.ours, found_other.theirs);
            failed = true;
        }
    }
}

struct ExchangeLds {
    SelectLds select;
    u32 scan[WORKGROUP];
    i32 nominees[TOPK_MAX];
    u64 ended;
    u32 error, generation, missing;
};

// Words of [half, source, owned head, row] before a nominee, behind the head.
DEVICE u64 first_word(const TopkExchangeArgs& a, u32 generation, u32 source, u32 head, u32 row) {
    return HEAD_WORDS + ((((u64)(generation % 2) * a.world + source) * a.owned + head) * a.peer_rows + row) * a.topk;
}

DEVICE u64 tag(const TopkExchangeArgs& a, u32 generation) { return generation & ((1u << a.tag_bits) - 1); }

// Stores this rank's best blocks of a (row, head) into the buffers of its owners.
DEVICE void nominate(const TopkExchangeArgs& a, u32 row, u32 head, u32 len, u32 first_owner, u32 owners, ExchangeLds& lds) {
    const u32 blocks = ceil_div(len, a.block_size);
    const u32 local = min_u32(ceil_div(blocks > a.rank ? blocks - a.rank : 0, a.world), a.score_width);
    const float* score = a.score + ((u64)head * a.score_rows + row) * a.score_width;
    u64 below = ~0ull;
    for (u32 first = 0; first < a.topk; first += PASS) {
        below = select(score, local, below, min_u32(PASS, a.topk - first), lds.nominees + first, lds.select);
    }
    barrier();
    const u64 to = first_word(a, lds.generation, a.rank, head % a.owned, row);
    for (u32 at = lane(); at < a.topk * owners; at += WORKGROUP) {
        const i32 nominee = lds.nominees[at % a.topk];
        // Local blocks and their numbers among all rise together: ties were broken as over all blocks.
        const u64 mine = nominee < 0 ? 0 : key(score[nominee], (u32)nominee * a.world + a.rank);
        const u64 word = tag(a, lds.generation) << 48 | (mine & 0xffff) << 32 | mine >> 32;
        store_release_system(peer(a, first_owner + at / a.topk) + to + at % a.topk, word);
    }
}

// Waits for every rank's words and selects among them; the first rank that is missing, or NOBODY.
DEVICE u32 merge(const TopkExchangeArgs& a, u32 row, u32 head, i32* selected, ExchangeLds& lds) {
    const u64* own = peer(a, a.rank);
    const u32 words = a.world * a.topk;
    for (u32 at = lane(); at < words; at += WORKGROUP) {
        const u32 source = at / a.topk;
        const u64* from = own + first_word(a, lds.generation, source, head % a.owned, row) + at % a.topk;
        Patience wait = patience(own, a.budget_us);
        u64 word = load_acquire_system(from);
        while (word >> 48 != tag(a, lds.generation)) {
            if (is_over(wait)) {
                lds_min(&lds.missing, source);
                word = 0;
                break;
            }
            word = load_acquire_system(from);
        }
        lds.select.candidates[at] = word << 32 | (word >> 32 & 0xffff);
    }
    barrier();
    if (lds.missing != NOBODY) return lds.missing;
    for (u32 at = lane(); at < words; at += WORKGROUP) {
        const u64 mine = lds.select.candidates[at];
        u32 above = 0;
        for (u32 other = 0; other < words; other++) above += lds.select.candidates[other] > mine;
        // Key 0 nominates nothing; its block is 0 as well.
        if (mine != 0 && above < a.topk) selected[above] = (i32)(u32)mine;
    }
    return NOBODY;
}

KERNEL void topk_exchange(const TopkExchangeArgs a) {
    LDS ExchangeLds lds;
    const u32 row = group(0), y = group(1);
    if (row >= a.rows || y >= a.heads) return;
    // Own heads come last: what waits is dispatched after everything that a peer waits for.
    const bool shared = a.owned == a.heads;
    const u32 head = shared ? y : (a.rank * a.owned + a.owned + y) % a.heads;
    const u32 first_owner = shared ? 0 : head / a.owned, owners = shared ? a.world : 1;
    const bool owns = shared || first_owner == a.rank;
    const i32 raw_len = a.row_len[row];
    u32 len = raw_len > 0 ? (u32)raw_len : 0;
    u64* own = peer(a, a.rank);
    if (lane() == 0) {
        lds.ended = load_acquire_system(own + POISON_WORD);
        if (lds.ended != 0) record(a.state, PEER_ENDED, (u32)lds.ended - 1, row, head);
        lds.error = (u32)load_acquire_system(error_word(a.state));
        lds.missing = NOBODY;
        if (len > 0 && lds.error == 0) {
            u32* generation = a.generations + (u64)head * a.peer_rows + row;
            lds.generation = *generation + 1;
            *generation = lds.generation;
        }
    }
    barrier();
    const bool takes_part = len > 0 && lds.error == 0;
    if (takes_part) nominate(a, row, head, len, first_owner, owners, lds);
    if (!owns) return;
    i32* selected = a.topk_idx + ((u64)(head % a.owned) * a.topk_rows + row) * a.topk;
    for (u32 at = lane(); at < a.topk; at += WORKGROUP) selected[at] = -1;
    barrier();
    u32 missing = NOBODY;
    if (takes_part) missing = merge(a, row, head, selected, lds);
    if (missing != NOBODY && lane() == 0) {
        const u64 ended = load_acquire_system(own + POISON_WORD);
        if (ended != 0) {
            record(a.state, PEER_ENDED, (u32)ended - 1, row, head);
        } else {
            record(a.state, PEER_TIMEOUT, missing | head << 16, row, lds.generation);
            end_group(a);
        }
    }
    barrier();
    emit(a, a.owned, row, head % a.owned, takes_part && missing == NOBODY ? len : 0, selected, lds.scan, lds.select);
}
