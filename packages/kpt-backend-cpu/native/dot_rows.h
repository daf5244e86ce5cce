// Weights whose K is contiguous: four rows of them at a time with up to eight of x, in registers.
#pragma once

#include "dot_formats.h"

namespace kpt {

namespace {

// Where x is larger than the nearest cache, so many of its rows, and so many times four columns of weights, are multiplied in
// ranges of K.
constexpr int64_t batch_rows = 18;
constexpr int64_t batch_columns = 2;
constexpr int64_t range_bytes = 2048;
constexpr int64_t near_bytes = 20 << 10;
// Else weights are asked for so far ahead: behind a column mostly the run's next one lies.
constexpr int64_t ahead_bytes = 2048;

// Four rows of weights from some k on, and those that will be wanted next (NULL for none; behind a run, others).
template <class T>
struct FourColumns {
    const T* now[tile_columns];
    const T* next[tile_columns];
};

// What the sums over each 128 of K are multiplied by, from some k on.
struct Scales {
    const float* weight[tile_columns];
    int64_t weight_step;
    const float* x;
    int64_t x_stride;
};

// Add the products of `count` numbers of K to `total[m][j]`.
// The columns are those from `from` on, N of them.
template <class D, int M, int N, bool SCALED>
KPT_INLINE void tile(
    const FourColumns<typename D::Weight>& w, int from, const typename D::Staged* const* x, int64_t count,
    const Scales& scales, vf (*total)[tile_columns]) {
    constexpr int64_t line = 64 / sizeof(typename D::Weight);
    const typename D::Weight* now[N];
    const typename D::Weight* next[N];
    const typename D::Staged* own[M];
    vf part[M][N];
    for (int j = 0; j < N; j++) {
        now[j] = w.now[from + j];
        next[j] = w.next[from + j];
    }
    for (int m = 0; m < M; m++) own[m] = x[m];
    typename D::Watch watch;
    const auto add = [&](int64_t k, auto get) __attribute__((always_inline)) {
        typename D::Vector weights[N][D::vectors];
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) get(now[j] + k, weights[j]);
#pragma GCC unroll 4
        for (int v = 0; v < D::vectors; v++) {
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                const auto xs = D::get_x(own[m] + k + v * (D::numbers / D::vectors));
#pragma GCC unroll 4
                for (int j = 0; j < N; j++) part[m][j] = D::dot(part[m][j], xs, weights[j][v]);
            }
        }
    };
    const auto whole = [&](const auto* p, typename D::Vector* out) __attribute__((always_inline)) {
        D::Watch::see(watch, p);
        D::get(p, out);
    };
    for (int64_t k = 0, block = 0; k < count; block++) {
        const int64_t end = SCALED && count - k > scale_block ? k + scale_block : count;
        for (int m = 0; m < M; m++) {
            for (int j = 0; j < N; j++) part[m][j] = SCALED ? vf{} : total[m][from + j];
        }
        if (w.next[0] != nullptr) {
            for (; k + line <= end; k += line) {
#pragma GCC unroll 4
                for (int j = 0; j < N; j++) __builtin_prefetch(next[j] + k, 0, 2);
                for (int64_t i = 0; i < line; i += D::numbers) add(k + i, whole);
            }
        }
        for (; k + D::numbers <= end; k += D::numbers) add(k, whole);
        if (k < end) add(k, [&](const auto* p, typename D::Vector* out) { D::get(p, end - k, out); });
        k = end;
        if (!SCALED) {
            for (int m = 0; m < M; m++) {
                for (int j = 0; j < N; j++) total[m][from + j] = part[m][j];
            }
            continue;
        }
        vf of_weight[N];
        for (int j = 0; j < N; j++) of_weight[j] = splat(scales.weight[from + j][block * scales.weight_step]);
        if (scales.x != nullptr) {
            for (int m = 0; m < M; m++) {
                const vf of_x = splat(scales.x[m * scales.x_stride + block]);
                for (int j = 0; j < N; j++) part[m][j] *= of_x;
            }
        }
        for (int m = 0; m < M; m++) {
            for (int j = 0; j < N; j++) total[m][from + j] += part[m][j] * of_weight[j];
        }
    }
    if (!D::Watch::alarmed(watch)) return;
    for (int j = 0; j < N; j++) {
        if (!D::Watch::has_nan(now[j], count)) continue;
        for (int m = 0; m < M; m++) total[m][from + j] += __builtin_nanf("");
    }
}

template <class D, int M>
void tile_of(
    int64_t rows, const FourColumns<typename D::Weight>& w, const typename D::Staged* const* x, int64_t count,
    bool scaled, const Scales& scales, vf (*total)[tile_columns]) {
    if constexpr (M > 1) {
        if (rows < M) return tile_of<D, M - 1>(rows, w, x, count, scaled, scales, total);
    }
    constexpr int N = M > D::wide_rows ? 2 : tile_columns;
    for (int from = 0; from < tile_columns; from += N) {
        if (scaled) tile<D, M, N, true>(w, from, x, count, scales, total);
        else tile<D, M, N, false>(w, from, x, count, scales, total);
    }
}

// `count` numbers of four rows of weights as they are multiplied, with zeros up to whole vectors.
template <class D>
void decode(const FourColumns<typename D::Weight>& w, int64_t count, typename D::Staged* out, int64_t stride) {
    constexpr int64_t line = 64 / sizeof(typename D::Weight);
    for (int64_t k = 0; k < count; k += D::numbers) {
        for (int j = 0; j < tile_columns; j++) {
            typename D::Vector vectors[D::vectors];
            if (w.next[0] != nullptr && k % line == 0) __builtin_prefetch(w.next[j] + k, 0, 2);
            D::get(w.now[j] + k, count - k, vectors);
            for (int v = 0; v < D::vectors; v++) {
                D::keep(out + j * stride + k + v * (D::numbers / D::vectors), vectors[v]);
            }
        }
    }
}

// Four runs of equal length that make up the columns begin..end: what is multiplied at a time is one column of each. Memory
// delivers runs that are far apart faster than neighbours, the more so the shorter columns are: those share pages.
struct Runs {
    int64_t begin, end, length;
    explicit Runs(const Product& p)
        : begin(p.begin), end(p.end), length((p.end - p.begin + tile_columns - 1) / tile_columns) {}
    int64_t column(int64_t i, int run) const { return begin + run * length + i; }
};

// The products of some rows of x, from `first` on, and columns, the i-th of each run.
template <class D>
class Batch {
public:
    Batch(const Product& p, bool large)
        : p_(p), runs_(p), range_(large ? range_bytes / static_cast<int64_t>(sizeof(Staged)) : p.staging.inner),
          width_(large ? batch_columns : 1),
          base_(static_cast<const Weight*>(p.weight.data) + p.expert * p.weight.stride_e) {}

    // Columns of a run, and how many are taken at a time.
    int64_t length() const { return runs_.length; }
    int64_t width() const { return width_; }

    void multiply(int64_t begin, int64_t first, int64_t rows, bool prefetching) {
        const int64_t count = runs_.length - begin < width_ ? runs_.length - begin : width_;
        for (int64_t i = 0; i < count; i++) {
            for (int64_t m = 0; m < rows; m++) {
                for (int j = 0; j < tile_columns; j++) total_[i][m][j] = vf{};
            }
        }
        for (int64_t k = 0; k < p_.staging.inner; k += range_) {
            for (int64_t i = 0; i < count; i++) add_range(begin + i, k, first, rows, prefetching, total_[i]);
        }
        for (int64_t i = 0; i < count; i++) {
            for (int64_t m = 0; m < rows; m++) write(begin + i, first + m, total_[i][m]);
        }
    }

private:
    using Weight = typename D::Weight;
    using Staged = typename D::Staged;

    void add_range(int64_t i, int64_t k, int64_t first, int64_t rows, bool prefetching, vf (*total)[tile_columns]) {
        const kpt_matrices& w = p_.weight;
        const bool last = k + range_ >= p_.staging.inner;
        const int64_t count = last ? p_.staging.inner - k : range_;
        const bool of_weight = w.scales_of == KPT_SCALES_BLOCK, of_x = p_.x_scale != nullptr;
        static constexpr float one = 1.0f;
        FourColumns<Weight> columns;
        Scales scales;
        scales.weight_step = of_weight ? w.stride_sk : 0;
        scales.x_stride = p_.x_scale_stride;
        for (int j = 0; j < tile_columns; j++) {
            // Past the end the last one once more, whose result is not used.
            const auto within = [&](int64_t column) { return column < runs_.end ? column : runs_.end - 1; };
            const int64_t column = within(runs_.column(i, j));
            columns.now[j] = base_ + column * w.stride_n + k;
            if (range_ >= p_.staging.inner) columns.next[j] = columns.now[j] + ahead_bytes / sizeof(Weight);
            else columns.next[j] = last ? base_ + within(column + width_) * w.stride_n : columns.now[j] + range_;
            scales.weight[j] = of_weight ? w.scale + p_.expert * w.stride_se + k / scale_block * w.stride_sk +
                                               column / scale_block * w.stride_sn
                                         : &one;
        }
        if (!prefetching) columns.next[0] = nullptr;
        const bool decoding = D::buffers && rows > D::most_rows;
        FourColumns<Staged> decoded{};
        if (decoding) {
            decode<D>(columns, count, decoded_, decoded_numbers);
            for (int j = 0; j < tile_columns; j++) decoded.now[j] = decoded_ + j * decoded_numbers;
        }
        const bool scaled = of_weight || of_x;
        const int64_t unscaled = decoding ? D::Decoded::most_rows : D::most_rows;
        const int64_t most = scaled && unscaled == tile_rows ? tile_rows_decoding : unscaled;
        const int64_t tiles = (rows + most - 1) / most;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t begin = rows * t / tiles, own = rows * (t + 1) / tiles - begin;
            const Staged* x[tall_rows];
            for (int64_t m = 0; m < own; m++) x[m] = static_cast<const Staged*>(p_.x[first + begin + m]) + k;
            scales.x = of_x ? p_.x_scale + (first + begin) * p_.x_scale_stride + k / scale_block : nullptr;
            if (decoding) {
                // Whole vectors: what lies behind the last number is zero in both.
                const int64_t whole = (count + D::numbers - 1) / D::numbers * D::numbers;
                tile_of<typename D::Decoded, D::Decoded::most_rows>(
                    own, decoded, x, whole, scaled, scales, total + begin);
            } else {
                tile_of<D, D::most_rows>(
                    own, columns, x, count, scaled, scales, total + begin);
                columns.next[0] = nullptr;
            }
        }
    }

    void write(int64_t i, int64_t m, const vf* total) const {
        const kpt_matrices& w = p_.weight;
        float sums[tile_columns];
        sums_of_four(total, sums);
        float* out = p_.out + m * p_.out_stride - runs_.begin;
        const float* scale = w.scales_of == KPT_SCALES_N ? w.scale + p_.expert * w.stride_se : nullptr;
        for (int j = 0; j < tile_columns; j++) {
            const int64_t column = runs_.column(i, j);
            const float sum = sums[j] * D::unit;
            if (column < runs_.end) out[column] = scale != nullptr ? sum * scale[column * w.stride_sn] : sum;
        }
    }

    static constexpr int64_t decoded_numbers = range_bytes / static_cast<int64_t>(sizeof(Staged));
    const Product& p_;
    const Runs runs_;
    const int64_t range_, width_;
    const Weight* const base_;
    alignas(64) vf total_[batch_columns][batch_rows][tile_columns];
    alignas(64) Staged decoded_[tile_columns * decoded_numbers];
};

template <class D>
void multiply_rows(const Product& p) {
    const bool large = p.rows > D::most_rows || p.rows * p.staging.bytes() > near_bytes;
    Batch<D> batch(p, large);
    const int64_t batches = (p.rows + batch_rows - 1) / batch_rows;
    for (int64_t i = 0; i < batch.length(); i += batch.width()) {
        for (int64_t b = 0; b < batches; b++) {
            const int64_t first = p.rows * b / batches, rows = p.rows * (b + 1) / batches - first;
            batch.multiply(i, first, rows, b == 0);
        }
    }
}

}  // namespace

}  // namespace kpt
