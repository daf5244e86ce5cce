// Gradients of the experts' matrices: products whose inner size is an expert's rows.
#pragma once

#include "tasks.h"

namespace kpt {

// The most rows of an expert.
KPT_INLINE int64_t most_rows(const int32_t* offsets, int64_t experts) {
    int64_t most = 0;
    for (int64_t expert = 0; expert < experts; expert++) {
        const int64_t rows = offsets[expert] - first_row(offsets, expert);
        if (rows > most) most = rows;
    }
    return most;
}

// `out[e] = sum over the rows r of e of x[r]^T grad[r]`, [K, N]. Experts without rows get zeros. Rows may be found through
// an index.
class WeightGradient {
public:
    // `out` has K or N contiguous; a null one has no tasks.
    WeightGradient(
        const kpt_rows& x, const int32_t* x_index, const kpt_rows& grad, const int32_t* grad_index,
        const kpt_matrices& out, int64_t inner, int64_t columns, const int32_t* offsets, int64_t experts)
        // Sums lie in rows; they are stored as such, so the contiguous side of the result is that of the columns.
        : turned_(out.stride_n != 1), of_rows_(turned_ ? grad : x), of_columns_(turned_ ? x : grad),
          index_of_rows_(turned_ ? grad_index : x_index), index_of_columns_(turned_ ? x_index : grad_index), out_(out),
          offsets_(offsets), heights_(ColumnBlocks::of(turned_ ? columns : inner, kTaskRows / kPanel * kPanel)),
          widths_(ColumnBlocks::of(turned_ ? inner : columns, columns_at_once(most_rows(offsets, experts)))),
          each_(out.data != nullptr ? heights_.count * widths_.count : 0) {}

    // Those of so many experts.
    int64_t tasks(int64_t experts) const { return each_ * experts; }

    // A task of the experts from `from` on. `base` is the number of the first row, where there is no index.
    void run(int64_t task, const Block& block, int64_t from = 0, int64_t base = 0) const {
        const int64_t expert = from + task / each_, height = task % each_ / widths_.count, width = task % widths_.count;
        const int64_t begin = first_row(offsets_, expert), rows = offsets_[expert] - begin;
        const int64_t stride = turned_ ? out_.stride_n : out_.stride_k;
        const Factor left = factor_across_rows(of_rows_, begin, base, index_of_rows_);
        const Factor right = factor_across_rows(of_columns_, begin, base, index_of_columns_);
        const Columns own{widths_.first(width), widths_.size(width)};
        const auto finish = [&](int64_t first, int64_t count, const float* sums) {
            with_float_type(out_.dtype, [&](auto type) {
                using T = decltype(type);
                T* out = static_cast<T*>(const_cast<void*>(out_.data)) + expert * out_.stride_e;
                for (int64_t r = 0; r < count; r++) {
                    store_run(out + (first + r) * stride + own.first, sums + r * own.pitch(), own.count);
                }
            });
        };
        multiply_plain(block, left, heights_.first(height), heights_.size(height), right, own, rows, finish);
    }

private:
    bool turned_;
    kpt_rows of_rows_, of_columns_;
    const int32_t *index_of_rows_, *index_of_columns_;
    kpt_matrices out_;
    const int32_t* offsets_;
    ColumnBlocks heights_, widths_;
    int64_t each_;
};

}  // namespace kpt
