// ingest, embed, publish: what frames a step. Formats: src/kernels/step.rs; op by op the same as src/kernels/cpu/step.rs.
#include "cell.h"
#include "reduce.h"
#include "state.h"

struct SlotHeader {
    u64 sequence;
    u32 live_sequences, live_rows, updates, kv_len_max, reserved[10];
};
static_assert(sizeof(SlotHeader) == 64, "SlotHeader");

// What of it the step works with, in registers.
struct Counts {
    u32 live_sequences, live_rows, updates, kv_len_max;
};

struct SequenceRecord {
    u32 slot, kv_len, query_len;
    float temperature;
    u32 top_k;
    float top_p, min_p;
    u32 reserved;
    u64 seed, reserved2;
};
static_assert(sizeof(SequenceRecord) == 48, "SequenceRecord");
constexpr u32 RECORD_CHUNKS = sizeof(SequenceRecord) / sizeof(Chunk);

struct BlockUpdate {
    u32 slot, index, block, reserved;
};
static_assert(sizeof(BlockUpdate) == 16, "BlockUpdate");

struct ResultHeader {
    u64 sequence;
    u32 live_sequences, live_rows, error, error_detail[3], reserved[8];
};
static_assert(sizeof(ResultHeader) == 64, "ResultHeader");

constexpr i32 TOKEN_FROM_DEVICE = -1;
constexpr u32 STALE_SLOT = 1, TOO_MANY_ROWS = 2, BLOCK_RANGE = 3;

struct Fault {
    u32 error, first, second, third;
};

// The first update or sequence that is wrong, by number; all lanes get it.
DEVICE u32 first_of(u32 mine, u32* least) {
    barrier();
    if (lane() == 0) *least = ~0u;
    barrier();
    if (mine != ~0u) lds_min(least, mine);
    barrier();
    return *least;
}

// Applies the updates before the first that is out of range, in their order; gives that one's number, or ~0.
DEVICE u32 apply_updates(const IngestArgs& a, const BlockUpdate* updates, u32 count, u32* least, BlockUpdate* part) {
    u32 wrong = ~0u;
    for (u32 i = lane(); i < count; i += WORKGROUP) {
        const BlockUpdate u = updates[i];
        if (u.slot >= a.slots || u.index >= a.table_width || u.block >= a.cache_blocks) {
            wrong = i;
            break;
        }
    }
    wrong = first_of(wrong, least);
    u32 end = min_u32(count, wrong);
    for (u32 first = 0; first < end; first += WORKGROUP) {
        u32 in_part = min_u32(end - first, WORKGROUP);
        barrier();
        if (lane() < in_part) part[lane()] = updates[first + lane()];
        barrier();
        if (lane() < in_part) {
            // Of two updates of one cell the later counts.
            BlockUpdate mine = part[lane()];
            bool last = true;
            for (u32 j = lane() + 1; j < in_part; j++) last = last && !(part[j].slot == mine.slot && part[j].index == mine.index);
            if (last) a.block_table[(u64)mine.slot * a.table_width + mine.index] = (i32)mine.block;
        }
    }
    return wrong;
}

// Block-table rows exist, query lengths fit the graph's shape and add up to the rows.
DEVICE Fault check_sequences(const IngestArgs& a, const SequenceRecord* records, const Counts& header, u32* least, u64* sums) {
    u32 wrong = ~0u;
    u64 rows = 0;
    for (u32 s = lane(); s < header.live_sequences; s += WORKGROUP) {
        u32 slot = records[s].slot, query_len = records[s].query_len;
        if (slot >= a.slots || (a.query_len > 0 && query_len != a.query_len)) wrong = min_u32(wrong, s);
        rows += query_len;
    }
    wrong = first_of(wrong, least);
    rows = workgroup_reduce(rows, sums, Add());
    if (wrong != ~0u) {
        u32 slot = records[wrong].slot, query_len = records[wrong].query_len;
        if (slot >= a.slots) return Fault{BLOCK_RANGE, wrong, 0, slot};
        return Fault{TOO_MANY_ROWS, query_len, a.query_len, wrong};
    }
    if (rows != header.live_rows) {
        return Fault{TOO_MANY_ROWS, rows > 0xffffffffull ? 0xffffffffu : (u32)rows, header.live_rows, 0};
    }
    return Fault{0, 0, 0, 0};
}

KERNEL void ingest(const IngestArgs a) {
    LDS u64 found_lds, sums[WORKGROUP / WAVE_LANES_LEAST];
    LDS u32 least, scan[WORKGROUP];
    LDS BlockUpdate part[WORKGROUP];
    StepState* state = (StepState*)a.state;
    const u64 expected = state->sequence + 1;
    const u8* base = a.ring + (expected % a.ring_slots) * a.slot_bytes;
    if (lane() == 0) {
        u64 found = load_acquire_system((const u64*)base);
        for (u32 poll = 0; poll < a.poll_limit && found < expected; poll++) {
            pause();
            found = load_acquire_system((const u64*)base);
        }
        found_lds = found;
    }
    barrier();
    const u64 found = found_lds;
    const SequenceRecord* records = (const SequenceRecord*)(base + sizeof(SlotHeader));
    const i32* tokens = (const i32*)(records + a.sequence_capacity);
    const BlockUpdate* updates = (const BlockUpdate*)(tokens + ceil_div(a.row_capacity, 4) * 4);

    const SlotHeader* slot = (const SlotHeader*)base;
    const Counts header = {slot->live_sequences, slot->live_rows, slot->updates, slot->kv_len_max};
    Fault fault = {0, 0, 0, 0};
    u32 sequences_most = min_u32(a.sequences, a.sequence_capacity), rows_most = min_u32(a.rows, a.row_capacity);
    if (found != expected) {
        fault = Fault{STALE_SLOT, (u32)expected, (u32)found, 0};
    } else if (header.live_sequences > sequences_most) {
        fault = Fault{TOO_MANY_ROWS, header.live_sequences, sequences_most, 0};
    } else if (header.live_rows > rows_most) {
        fault = Fault{TOO_MANY_ROWS, header.live_rows, rows_most, 0};
    } else if (header.updates > a.update_capacity) {
        fault = Fault{TOO_MANY_ROWS, header.updates, a.update_capacity, 0};
    } else {
        // Every lane takes the same way: the conditions above are the same for all.
        u32 wrong = apply_updates(a, updates, header.updates, &least, part);
        if (wrong != ~0u) {
            BlockUpdate u = updates[wrong];
            fault = Fault{BLOCK_RANGE, u.slot, u.index, u.block};
        } else {
            fault = check_sequences(a, records, header, &least, sums);
        }
    }
    const bool good = fault.error == 0;
    const u32 live = good ? header.live_sequences : 0;

    // Sequences: records, lengths, prefix sums of query lengths.
    SequenceRecord* kept = (SequenceRecord*)a.records;
    if (lane() == 0) a.cu_seqlens[0] = 0;
    u32 rows = 0;
    for (u32 first = 0; first < a.sequences; first += WORKGROUP) {
        u32 s = first + lane(), total;
        // A record in registers: slot, kv_len and query_len are its first words.
        Chunk record[RECORD_CHUNKS];
        UNROLL for (u32 i = 0; i < RECORD_CHUNKS; i++) {
            UNROLL for (u32 w = 0; w < 4; w++) record[i].word[w] = 0;
            if (s < live) record[i] = ((const Chunk*)(records + s))[i];
        }
        const u32 query_len = record[0].word[2];
        u32 before = workgroup_scan(query_len, scan, total);
        if (s < a.sequences) {
            a.seq_slot[s] = (i32)record[0].word[0];
            a.seq_len[s] = (i32)record[0].word[1];
            a.cu_seqlens[s + 1] = (i32)(rows + before + query_len);
            UNROLL for (u32 i = 0; i < RECORD_CHUNKS; i++) ((Chunk*)(kept + s))[i] = record[i];
        }
        rows += total;
    }
    barrier();
    // Rows: a live row finds its sequence by bisection; the rest are pads.
    for (u32 n = lane(); n < a.rows; n += WORKGROUP) {
        i32 seq = 0, table_row = 0, len = 0, token = 0;
        if (n < rows) {
            u32 low = 0, high = live;
            while (high - low > 1) {
                u32 middle = (low + high) / 2;
                if ((u32)a.cu_seqlens[middle] <= n) low = middle;
                else high = middle;
            }
            const SequenceRecord& record = kept[low];
            u32 t = n - (u32)a.cu_seqlens[low];
            i64 causal = (i64)record.kv_len - (i64)record.query_len + (i64)t + 1;
            seq = (i32)low;
            table_row = (i32)record.slot;
            len = (i32)(causal > 0 ? causal : 0);
            token = tokens[n];
            if (token == TOKEN_FROM_DEVICE) token = a.last_token[record.slot];
        }
        a.row_seq[n] = seq;
        a.row_slot[n] = table_row;
        a.row_len[n] = len;
        a.tokens[n] = token;
    }
    if (lane() == 0) {
        StepState next = {};
        next.sequence = expected;
        next.live_sequences = live;
        next.live_rows = good ? header.live_rows : 0;
        next.kv_len_max = good ? header.kv_len_max : 0;
        next.error = fault.error;
        next.error_detail[0] = fault.first;
        next.error_detail[1] = fault.second;
        next.error_detail[2] = fault.third;
        *state = next;
    }
}

KERNEL void embed(const EmbedArgs a) {
    const u32 row = group(0);
    if (row >= a.rows) return;
    const i32 token = a.tokens[row];
    const bool known = a.row_len[row] > 0 && token >= 0 && (u32)token < a.vocab;
    float* out = a.out + (u64)row * a.width;
    for (u32 c = lane(); c < a.width; c += WORKGROUP) {
        float value = 0.0f;
        if (known) {
            u64 at = (u64)token * a.width + c;
            value = a.table_dtype == DTYPE_F32 ? ((const float*)a.table)[at] : Bf16::decode(((const u16*)a.table)[at]);
        }
        out[c] = value;
    }
}

KERNEL void publish(const PublishArgs a) {
    const StepState state = *(const StepState*)a.state;
    u8* base = a.results + (state.sequence % a.ring_slots) * a.result_bytes;
    ResultHeader* header = (ResultHeader*)base;
    i32* out = (i32*)(base + sizeof(ResultHeader));
    const u32 rows = min_u32(a.rows, (a.result_bytes - (u32)sizeof(ResultHeader)) / 4);
    for (u32 n = lane(); n < rows; n += WORKGROUP) out[n] = a.tokens[n];
    if (lane() == 0) {
        header->live_sequences = state.live_sequences;
        header->live_rows = state.live_rows;
        header->error = state.error;
        UNROLL for (u32 i = 0; i < 3; i++) header->error_detail[i] = state.error_detail[i];
        for (u32 i = 0; i < 8; i++) header->reserved[i] = 0;
    }
    // Each lane's words reach the host before the number that says so.
    fence_system();
    barrier();
    if (lane() == 0) store_release_system(&header->sequence, state.sequence);
}
