// What forward and backward of moe.experts over many rows share.
#pragma once

#include "activation.h"
#include "tasks.h"

namespace kpt {

KPT_INLINE int64_t pairs_of(const struct ::kpt_experts& p) { return p.tokens * p.top_k; }
// Sorted rows that belong to an expert here.
KPT_INLINE int64_t rows_here(const struct ::kpt_experts& p) { return p.experts > 0 ? p.offsets[p.experts - 1] : 0; }

KPT_INLINE bool is_here(const struct ::kpt_experts& p, int64_t pair) {
    const int64_t id = p.index_is_int64 ? static_cast<const int64_t*>(p.index)[pair]
                                        : static_cast<const int32_t*>(p.index)[pair];
    return id >= 0 && id < p.experts;
}

KPT_INLINE bool is_gated(const struct ::kpt_experts& p) { return p.act.kind <= KPT_REGLU; }

KPT_INLINE int64_t multiplications_of(const struct ::kpt_experts& p) {
    return pairs_of(p) * p.hidden * (p.width + p.intermediate);
}

KPT_INLINE float weight_of(const kpt_rows& weights, int64_t pair) {
    float value = 0;
    with_float_type(weights.dtype, [&](auto type) {
        using T = decltype(type);
        value = widen(static_cast<const T*>(weights.data)[pair]);
    });
    return value;
}

// Blocks of memory behind one another, each on a cache line of its own: first their sizes, then their addresses.
class Layout {
public:
    int64_t add(int64_t bytes) {
        const int64_t at = size_;
        size_ += round_up(bytes, 64);
        return at;
    }
    int64_t size() const { return size_; }

private:
    int64_t size_ = 0;
};

// Columns of gate and up that make the activation's columns `first .. first + count`.
KPT_INLINE Columns gate_and_up(const struct ::kpt_experts& p, int64_t first, int64_t count) {
    if (!is_gated(p)) return {first, count};
    if (p.act.interleaved) return {2 * first, 2 * count};
    return {first, count, p.intermediate + first};
}

// A run of a pre-activation row, gate and up apart in float32, and back. Runs are at most kColumns of each.
template <class T>
KPT_INLINE void split_gates(const T* h, bool gated, bool interleaved, int64_t up, int64_t count, float* gate, float* ups) {
    if (gated && interleaved) {
        for (int64_t j = 0; j < count; j++) {
            gate[j] = widen(h[2 * j]);
            ups[j] = widen(h[2 * j + 1]);
        }
        return;
    }
    for (int64_t j = 0; j < count; j += W) {
        store(gate + j, load(h + j, count - j));
        if (gated) store(ups + j, load(h + up + j, count - j));
    }
}

template <class T>
KPT_INLINE void join_gates(T* h, bool gated, bool interleaved, int64_t up, int64_t count, const float* gate, const float* ups) {
    if (gated && interleaved) {
        for (int64_t j = 0; j < count; j++) {
            narrow(gate[j], h + 2 * j);
            narrow(ups[j], h + 2 * j + 1);
        }
        return;
    }
    store_run(h, gate, count);
    if (gated) store_run(h + up, ups, count);
}

// `out[t]` is the sum of the rows of t's pairs that are here; rows lie in the order of pairs, and weights are in them.
template <class T>
void sum_pairs(const struct ::kpt_experts& p, const T* rows, const kpt_rows& out, const Member& member) {
    int64_t begin, end;
    member.share(p.tokens, 1, begin, end);
    for (int64_t t = begin; t < end; t++) {
        T* to = row_of<T>(out, t);
        const T* own = rows + t * p.top_k * p.hidden;
        constexpr int many = 4;
        for (int64_t j = 0; j < p.hidden; j += many * W) {
            vf sums[many] = {};
            for (int64_t k = 0; k < p.top_k; k++) {
                if (!is_here(p, t * p.top_k + k)) continue;
                for (int i = 0; i < many; i++) {
                    const int64_t at = j + i * W;
                    if (at < p.hidden) sums[i] += load(own + k * p.hidden + at, p.hidden - at);
                }
            }
            for (int i = 0; i < many; i++) {
                const int64_t at = j + i * W;
                if (at < p.hidden) store(to + at, sums[i], p.hidden - at);
            }
        }
    }
}

}  // namespace kpt
