// What forward and backward of moe.experts over many rows share.
#pragma once

#include "activation.h"
#include "routing.h"
#include "scratch.h"
#include "tasks.h"

namespace kpt {

// Sorted rows that belong to an expert here.
KPT_INLINE int64_t rows_here(const struct ::kpt_experts& p) { return p.experts > 0 ? p.offsets[p.experts - 1] : 0; }

KPT_INLINE int64_t multiplications_of(const struct ::kpt_experts& p) {
    return pairs_of(p) * p.hidden * (p.width + p.intermediate);
}

// Columns of gate and up that make the activation's columns `first .. first + count`.
KPT_INLINE Columns gate_and_up(const struct ::kpt_experts& p, int64_t first, int64_t count) {
    if (!is_gated(p)) return {first, count};
    if (p.act.interleaved) return {2 * first, 2 * count};
    return {first, count, p.intermediate + first};
}

// Blocks of rows whose intermediate results are kept at a time: fresh memory costs more than the arithmetic on it. Their
// number follows from what a row needs, and each thread is to have some tasks of them.
struct Groups {
    const RowBlock* blocks;
    int64_t count, row_bytes, tasks_of_block;
    int threads;
    bool whole_experts;

    // The block behind the group that begins with `first`.
    int64_t end(int64_t first) const {
        constexpr int64_t bytes = int64_t{1} << 23;
        int64_t rows = 0, i = first;
        const auto belongs = [&] {
            return rows * row_bytes < bytes || (i - first) * tasks_of_block < 4 * threads ||
                   (whole_experts && blocks[i].expert == blocks[i - 1].expert);
        };
        while (i < count && belongs()) rows += blocks[i++].rows;
        return i;
    }
    int64_t rows(int64_t first) const {
        const int64_t last = end(first) - 1;
        return blocks[last].first + blocks[last].rows - blocks[first].first;
    }
    int64_t most_rows() const {
        int64_t most = 0;
        for (int64_t first = 0; first < count; first = end(first)) most = rows(first) > most ? rows(first) : most;
        return most;
    }
};

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

// Tokens that are summed in one task.
constexpr int64_t tokens_of_task = 16;

// For the tokens begin..end: `out[t]` is the sum of the rows of t's pairs that are here; rows lie in the order of pairs,
// and weights are in them.
template <class T>
void sum_pairs(const struct ::kpt_experts& p, const T* rows, const kpt_rows& out, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
        T* to = row_of<T>(out, t);
        const T* own = rows + t * p.top_k * p.hidden;
        constexpr int many = 4;
        for (int64_t j = 0; j < p.hidden; j += many * W) {
            vf sums[many] = {};
            for (int64_t k = 0; k < p.top_k; k++) {
                if (expert_of(p, t * p.top_k + k) < 0) continue;
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
