// Products of few rows of x with large weights: the time is that of reading the weights, so each is read once.
#pragma once

#include "parallel.h"
#include "simd.h"

namespace kpt {

// Rows and columns that share one scale.
constexpr int64_t scale_block = 128;

// How rows of x lie ready: as bfloat16 where that is exact and the weights multiply by VDPBF16PS, else as float32; with
// zeros up to a multiple of 64. `octets`: eights of each 64 numbers in the order that 8-bit weights are decoded to.
struct Staging {
    static constexpr int64_t group = 64;
    bool bf16, octets;
    int64_t inner;
    int64_t padded() const { return (inner + group - 1) / group * group; }
    int64_t bytes() const { return padded() * (bf16 ? 2 : 4); }
};

Staging staging_for(int32_t x_dtype, const kpt_matrices& weight, int64_t inner);

// Stage `count` numbers from index `begin` of a row on, a multiple of 64, with the zeros up to the next multiple.
void stage(const Staging& staging, const float* values, int64_t begin, int64_t count, void* row);

// Widen `count` numbers of any dtype.
void widen_all(const void* values, int32_t dtype, int64_t count, float* out);

// Round `count` numbers to any float dtype.
void narrow_all(const float* values, int64_t count, int32_t dtype, void* out);

// `out[m][n - begin] = sum_k x[m][k] * weight[expert][k][n] * its scale` for the columns begin..end. Scales of K are
// multiplied into x when it is staged. So is x_scale, of each row and 128 of K, where it is not staged as bfloat16.
struct Product {
    const kpt_matrices& weight;
    int64_t expert, begin, end;
    Staging staging;
    const void* const* x;
    int64_t rows;
    const float* x_scale;
    int64_t x_scale_stride;
    float* out;
    int64_t out_stride;
};

void multiply(const Product& product);

// Threads for reading so many bytes of weights: to start another one takes as long as reading 64 KiB.
KPT_INLINE int threads_to_read(int64_t bytes, int threads) { return bytes < (1 << 17) ? 1 : threads; }

// An expert with rows: which in sorted order, of `first` on.
struct Active {
    int64_t expert, first, rows;
};

// `columns` in about so many parts, each of whole groups.
KPT_INLINE int64_t columns_of_part(int64_t columns, int64_t parts) {
    const int64_t groups = columns / parts / Staging::group;
    return (groups > 0 ? groups : 1) * Staging::group;
}

// The columns of all experts with rows in parts for threads to take, of 64 KiB of weights or more: large ones, whose runs
// (see dot_rows.h) are far apart, where each thread still has some.
class Parts {
public:
    // `column_bytes` are those of a column of weights; parts begin at multiples of Staging::group.
    Parts(const Active* active, int64_t num_active, int64_t columns, int64_t column_bytes, int threads)
        : active_(active), columns_(columns) {
        const auto columns_of = [&](int64_t bytes) {
            return (bytes / (column_bytes + 1) / Staging::group + 1) * Staging::group;
        };
        const int64_t least = columns_of(int64_t{1} << 16), most = columns_of(int64_t{1} << 20);
        const int64_t wanted = columns_of_part(num_active * columns, int64_t{16} * threads);
        step_ = wanted < least ? least : wanted > most ? most : wanted;
        each_ = (columns + step_ - 1) / step_;
        count_ = each_ * num_active;
    }

    // Call `body(active, begin, end)` for every part, and wait until all are done.
    template <class Body>
    void run(Tasks& tasks, Body&& body) const {
        tasks.all(count_, [&](int64_t part) {
            const int64_t begin = part % each_ * step_, end = begin + step_;
            body(active_[part / each_], begin, end < columns_ ? end : columns_);
        });
    }

private:
    const Active* active_;
    int64_t columns_, step_, each_, count_;
};

// Columns that one `multiply` is to be asked for: their results should stay in the nearest caches.
constexpr int64_t most_results = 8192, most_columns = 512;

KPT_INLINE int64_t columns_for_rows(int64_t rows) {
    const int64_t columns = most_results / (rows > 0 ? rows : 1) / Staging::group * Staging::group;
    return columns < Staging::group ? Staging::group : columns > most_columns ? most_columns : columns;
}

// Enough for the results of any number of rows up to this.
KPT_INLINE int64_t results_at_once(int64_t most_rows) {
    const int64_t narrow = most_rows * Staging::group;
    return narrow > most_results ? narrow : most_results;
}

}  // namespace kpt
