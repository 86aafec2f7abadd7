// sample: greedy, temperature, top-k, top-p, min-p, by the steps of src/kernels/cpu/sample.rs.
//
// Sums of weights run in integers of 2^-44, so that they do not depend on the order in which lanes add; a draw is the same on
// every run. They differ from the CPU op's f64 sums by less than the vocabulary times 2^-45.
#include "cell.h"
#include "reduce.h"

struct SequenceRecord {
    u32 slot, kv_len, query_len;
    float temperature;
    u32 top_k;
    float top_p, min_p;
    u32 reserved;
    u64 seed, reserved2;
};
static_assert(sizeof(SequenceRecord) == 48, "SequenceRecord");

constexpr double UNIT = 17592186044416.0;  // 2^44

struct SampleLds {
    u64 digits[256];
    u64 scratch[WORKGROUP / WAVE_LANES_LEAST];
    u64 parts[WORKGROUP];
};

// Orders logits as integers; NaN counts as minus infinity, -0 equals +0.
DEVICE u32 key(float logit) {
    const u32 b = is_nan(logit) ? 0xff800000u : bits(logit + 0.0f);
    return b >> 31 ? ~b : b | 0x80000000u;
}

DEVICE u64 mix(u64 z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

// A number in [0, 1) with 53 bits from (seed, position).
DEVICE double uniform(u64 seed, u64 position) {
    const u64 golden = 0x9e3779b97f4a7c15ull;
    const u64 random = mix(mix(seed + golden) + position * golden);
    return (double)(random >> 11) / 9007199254740992.0;
}

// The candidates kept: all whose key is above `key`, and those that have it up to id `last`.
struct Cut {
    u32 key, last;
    DEVICE bool keeps(u32 k, u32 id) const { return k > key || (k == key && id <= last); }
};

struct Weights {
    float most, inverse_temperature;
    // Relative to the most likely token, in [0, 1].
    DEVICE float of(float logit) const {
        if (logit == most) return 1.0f;
        if (!(logit < most)) return 0.0f;
        // Below the range of `exp_portable` nothing is left of it.
        const float x = (logit - most) * inverse_temperature;
        return x < -87.0f ? 0.0f : exp_portable(x);
    }
    DEVICE u64 fixed(float logit) const { return (u64)((double)of(logit) * UNIT); }
};

template <class F> DEVICE u64 sum_over(u32 vocab, SampleLds& lds, F measure) {
    u64 sum = 0;
    for (u32 id = lane(); id < vocab; id += WORKGROUP) sum += measure(id);
    return workgroup_reduce(sum, lds.scratch, Add());
}

// The first id whose running sum of `measure` exceeds `target`; the sum of all must. Each round keeps one of 256 runs of ids.
template <class F> DEVICE u32 first_past(u32 vocab, u64 target, SampleLds& lds, F measure) {
    u32 low = 0, high = vocab;
    while (high - low > 1) {
        const u32 run = ceil_div(high - low, WORKGROUP);
        barrier();
        lds.parts[lane()] = 0;
        barrier();
        // Neighbouring lanes read neighbouring ids, and add to the run each belongs to.
        for (u32 id = low + lane(); id < high; id += WORKGROUP) {
            const u64 amount = measure(id);
            if (amount > 0) lds_add(&lds.parts[(id - low) / run], amount);
        }
        barrier();
        u32 part = 0;
        while (part + 1 < WORKGROUP && low + (part + 1) * run < high && lds.parts[part] <= target) target -= lds.parts[part++];
        low += part * run;
        high = min_u32(high, low + run);
    }
    return low;
}

// The shortest prefix, in order, of what `cut` keeps whose `measure` sums to at least `target` (at least one candidate).
template <class F> DEVICE Cut narrow(const float* logits, u32 vocab, Cut cut, double target, SampleLds& lds, F measure) {
    u32 prefix = 0;
    double above = 0.0, each = 0.0;
    for (i32 shift = 24; shift >= 0; shift -= 8) {
        barrier();
        lds.digits[lane()] = 0;
        barrier();
        for (u32 id = lane(); id < vocab; id += WORKGROUP) {
            const float logit = logits[id];
            const u32 k = key(logit);
            if (!cut.keeps(k, id)) continue;
            if (shift == 24 || k >> (shift + 8) == prefix >> (shift + 8)) {
                const u64 amount = measure(logit);
                if (amount > 0) lds_add(&lds.digits[k >> shift & 255], amount);
            }
        }
        barrier();
        // The last digit that counts anything, should rounding leave the target out of reach.
        u32 lowest = 0;
        while (lowest < 255 && lds.digits[lowest] == 0) lowest++;
        u32 digit = 255;
        while (digit > lowest && above + (double)lds.digits[digit] < target) above += (double)lds.digits[digit--];
        prefix |= digit << shift;
        each = (double)lds.digits[digit];
    }
    // All of the last digit's candidates have the same logit: take as many as are needed.
    auto equal = [&](u32 id) -> u64 { return key(logits[id]) == prefix && cut.keeps(prefix, id); };
    const double count = (double)sum_over(vocab, lds, equal);
    double needed = 1.0;
    if (each > 0.0) {
        needed = ceil_f64((target - above) / (each / count));
        needed = needed < 1.0 ? 1.0 : needed > count ? count : needed;
    }
    return Cut{prefix, count > 0.0 ? first_past(vocab, (u64)needed - 1, lds, equal) : 0};
}

DEVICE u32 draw(const float* logits, u32 vocab, const SequenceRecord& record, u64 position, SampleLds& lds) {
    u64 largest = 0;
    for (u32 id = lane(); id < vocab; id += WORKGROUP) {
        const u64 mine = (u64)key(logits[id]) << 32 | (0xffffffffu - id);
        largest = mine > largest ? mine : largest;
    }
    largest = workgroup_reduce(largest, lds.scratch, Most());
    const u32 best = 0xffffffffu - (u32)largest;
    const float most = logits[best];
    // The key of minus infinity: nothing is larger than it but by a real number.
    const bool nothing = (u32)(largest >> 32) == ~0xff800000u;
    if (nothing) return 0;
    if (is_nan(record.temperature) || record.temperature <= 0.0f) return best;
    const Weights weights = {most, 1.0f / record.temperature};
    Cut cut = {0, ~0u};
    if (record.top_k > 0 && record.top_k < vocab) {
        cut = narrow(logits, vocab, cut, (double)record.top_k, lds, [](float) -> u64 { return 1; });
    }
    auto fixed = [&](float logit) { return weights.fixed(logit); };
    if (record.top_p < 1.0f) {
        auto kept = [&](u32 id) -> u64 { return cut.keeps(key(logits[id]), id) ? weights.fixed(logits[id]) : 0; };
        const double share = record.top_p > 0.0f ? record.top_p : 0.0f;
        const double target = share * (double)sum_over(vocab, lds, kept);
        cut = narrow(logits, vocab, cut, target, lds, fixed);
    }
    auto kept = [&](u32 id) -> u64 {
        const float logit = logits[id];
        return cut.keeps(key(logit), id) && weights.of(logit) >= record.min_p ? weights.fixed(logit) : 0;
    };
    const u64 all = sum_over(vocab, lds, kept);
    if (all == 0) return best;
    u64 target = (u64)(uniform(record.seed, position) * (double)all);
    if (target >= all) target = all - 1;
    return first_past(vocab, target, lds, kept);
}

KERNEL void sample(const SampleArgs a) {
    LDS SampleLds lds;
    const u32 i = group(0);
    if (i >= a.rows) return;
    const i32 row = a.indexed != 0 ? a.rows_index[i] : (i32)i;
    u32 token = 0;
    if (row >= 0 && (u32)row < a.step_rows) {
        const i32 len = a.row_len[row], sequence = a.row_seq[row];
        if (len > 0 && sequence >= 0 && (u32)sequence < a.sequences) {
            const SequenceRecord record = ((const SequenceRecord*)a.records)[sequence];
            token = draw(a.logits + (u64)i * a.vocab, a.vocab, record, (u64)len, lds);
            // Only the last row of a sequence sees all of its tokens.
            const i32 slot = a.row_slot[row];
            if (lane() == 0 && (u32)len == record.kv_len && slot >= 0 && (u32)slot < a.slots) a.last_token[slot] = (i32)token;
        }
    }
    if (lane() == 0) a.out[i] = (i32)token;
}
