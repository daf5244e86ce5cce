// Gradients of the experts' matrices: products whose inner size is an expert's rows.
#pragma once

#include "tasks.h"

namespace kpt {

// `out[e] = sum over the rows r of e of x[r]^T grad[r]`, [K, N]; the rows may be found through an index.
struct WeightGradient {
    kpt_rows x;
    const int32_t* x_index;
    kpt_rows grad;
    const int32_t* grad_index;
    kpt_matrices out; // K or N contiguous
    int64_t inner, columns;
    const int32_t* offsets;
    int64_t experts;
};

// The most rows of an expert.
KPT_INLINE int64_t most_rows(const int32_t* offsets, int64_t experts) {
    int64_t most = 0;
    for (int64_t expert = 0; expert < experts; expert++) {
        const int64_t rows = offsets[expert] - first_row(offsets, expert);
        if (rows > most) most = rows;
    }
    return most;
}

// Take tasks from `next` until there is none. Experts without rows get zeros.
KPT_INLINE void weight_gradient(const WeightGradient& w, const Block& block, Counter& next) {
    // Sums lie in rows; they are stored as such, so the contiguous side of the result is that of the columns.
    const bool turned = w.out.stride_n != 1;
    const kpt_rows& of_rows = turned ? w.grad : w.x;
    const kpt_rows& of_columns = turned ? w.x : w.grad;
    const int32_t* index_of_rows = turned ? w.grad_index : w.x_index;
    const int32_t* index_of_columns = turned ? w.x_index : w.grad_index;
    const int64_t widest = columns_at_once(most_rows(w.offsets, w.experts));
    const int64_t stride = turned ? w.out.stride_n : w.out.stride_k;
    const ColumnBlocks heights = ColumnBlocks::of(turned ? w.columns : w.inner, kTaskRows / kPanel * kPanel);
    const ColumnBlocks widths = ColumnBlocks::of(turned ? w.inner : w.columns, widest);
    const int64_t each = heights.count * widths.count, tasks = each * w.experts;
    for (int64_t task = next.next(); task < tasks; task = next.next()) {
        const int64_t expert = task / each, height = task % each / widths.count, width = task % widths.count;
        const int64_t begin = first_row(w.offsets, expert), rows = w.offsets[expert] - begin;
        const Factor left = factor_across_rows(of_rows, begin, index_of_rows);
        const Factor right = factor_across_rows(of_columns, begin, index_of_columns);
        const Columns own{widths.first(width), widths.size(width)};
        const auto finish = [&](int64_t first, int64_t count, const float* sums) {
            with_float_type(w.out.dtype, [&](auto type) {
                using T = decltype(type);
                T* out = static_cast<T*>(const_cast<void*>(w.out.data)) + expert * w.out.stride_e;
                for (int64_t r = 0; r < count; r++) {
                    store_run(out + (first + r) * stride + own.first, sums + r * own.width(), own.count);
                }
            });
        };
        multiply_plain(block, left, heights.first(height), heights.size(height), right, own, rows, finish);
    }
}

}  // namespace kpt
