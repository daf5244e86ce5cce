// How the rows of experts are cut into tasks, and what the kernels of many rows share.
#pragma once

#include "parallel.h"
#include "product.h"

namespace kpt {

// Some sorted rows of one expert.
struct RowBlock {
    int64_t expert, first, rows;
};

KPT_INLINE int64_t first_row(const int32_t* offsets, int64_t expert) { return expert > 0 ? offsets[expert - 1] : 0; }

// At most so many blocks cover `rows` rows of `experts` experts.
KPT_INLINE int64_t most_row_blocks(int64_t rows, int64_t experts) { return experts + rows / kRows + 1; }

// Cut every expert's rows into blocks of nearly equal height; returns how many there are. `tasks` is how many tasks a block of
// the highest kind makes: where threads would be left without any, blocks are lower.
KPT_INLINE int64_t cut_rows(const int32_t* offsets, int64_t experts, int64_t tasks, int threads, RowBlock* out) {
    int64_t high = 0;
    for (int64_t expert = 0; expert < experts; expert++) {
        high += (offsets[expert] - first_row(offsets, expert) + kTaskRows - 1) / kTaskRows;
    }
    const int64_t most = high * tasks >= 4 * threads ? kTaskRows : kRows;
    int64_t count = 0;
    for (int64_t expert = 0; expert < experts; expert++) {
        const int64_t begin = first_row(offsets, expert), rows = offsets[expert] - begin;
        const int64_t parts = (rows + most - 1) / most;
        for (int64_t part = 0; part < parts; part++) {
            const int64_t from = rows * part / parts, to = rows * (part + 1) / parts;
            out[count++] = {expert, begin + from, to - from};
        }
    }
    return count;
}

// Blocks of columns of nearly equal width, whole panels but for the last.
struct ColumnBlocks {
    int64_t columns, width, count;

    // Blocks of `columns` that are at most `most` wide.
    static ColumnBlocks of(int64_t columns, int64_t most) {
        const int64_t parts = (columns + most - 1) / most;
        const int64_t width = parts > 0 ? round_up((columns + parts - 1) / parts, kPanel) : kPanel;
        return {columns, width, (columns + width - 1) / width};
    }
    int64_t first(int64_t block) const { return block * width; }
    int64_t size(int64_t block) const { return columns - first(block) < width ? columns - first(block) : width; }
};

// Rows [rows, columns] as a left factor whose inner size is the columns.
KPT_INLINE Factor factor_of_rows(const kpt_rows& rows, const int32_t* index) {
    return {rows.data, rows.stride, index, rows.dtype, true, {}};
}

// The transpose of some rows, from number `first` on, as a factor whose inner size is the rows. They lie where `index` says,
// which starts at row 0, or, if there is none, behind one another from row `base` on.
KPT_INLINE Factor factor_across_rows(const kpt_rows& rows, int64_t first, int64_t base, const int32_t* index) {
    const char* data = static_cast<const char*>(rows.data);
    if (index == nullptr) data += (first - base) * rows.stride * size_of(rows.dtype);
    return {data, rows.stride, index != nullptr ? index + first : nullptr, rows.dtype, false, {}};
}

// Address of a row of numbers of type T.
template <class T>
KPT_INLINE T* row_of(const kpt_rows& rows, int64_t row, int64_t column = 0) {
    return static_cast<T*>(rows.data) + row * rows.stride + column;
}

// Narrow `count` sums.
template <class T>
KPT_INLINE void store_run(T* out, const float* sums, int64_t count) {
    for (int64_t j = 0; j < count; j += W) store(out + j, load(sums + j, count - j), count - j);
}

// The same, times a factor and plus a bias.
template <class T>
KPT_INLINE void store_run(T* out, const float* sums, int64_t count, float factor, const float* bias) {
    for (int64_t j = 0; j < count; j += W) {
        store(out + j, load(sums + j, count - j) * factor + load(bias + j, count - j), count - j);
    }
}

KPT_INLINE void zero_rows(const kpt_rows& rows, int64_t begin, int64_t end, int64_t columns) {
    const int64_t size = size_of(rows.dtype);
    for (int64_t row = begin; row < end; row++) {
        memset(static_cast<char*>(rows.data) + row * rows.stride * size, 0, columns * size);
    }
}

// Where threads cost more than they bring.
KPT_INLINE int threads_for(int64_t multiplications, int threads) { return multiplications < (1 << 18) ? 1 : threads; }

}  // namespace kpt
