// The innermost loop of products: some rows of packed slots by a panel of columns, sums in registers.
#pragma once

#include "product.h"

namespace kpt {

namespace {

// Rows whose sums are kept in registers: with two vectors of columns each, and what is multiplied, they fill them.
#if defined(__AVX512F__)
constexpr int kTall = 14;
#elif defined(__AVX2__)
constexpr int kTall = 6;
#else
constexpr int kTall = 4;
#endif

// `c = left right (scales) [+ c]` for M rows and a panel of columns.
//
// Slots of the left factor's rows lie `Row` apart, those along the inner size `Depth`: constants, so that the rows are
// one address and what is added to it.
template <class Kind, int M, int64_t Row = kPitch, int64_t Depth = 1>
void multiply_panel(
    const slot* left, const slot* right, int64_t depth, float* c, int64_t stride, const float* scales, bool add) {
    vf sums[M][2] = {};
    for (int64_t s = 0; s < depth; s++) {
        const vf first = load(reinterpret_cast<const float*>(right + s * kPanel));
        const vf second = load(reinterpret_cast<const float*>(right + s * kPanel + W));
#pragma GCC unroll 16
        for (int i = 0; i < M; i++) {
            const vf own = (vf)splat_int(static_cast<int32_t>(left[i * Row + s * Depth]));
            sums[i][0] = Kind::multiply_add(own, first, sums[i][0]);
            sums[i][1] = Kind::multiply_add(own, second, sums[i][1]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < M; i++) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            float* p = c + i * stride + half * W;
            vf value = sums[i][half];
            if (scales != nullptr) value *= load(scales + half * W);
            store(p, add ? load(p) + value : value);
        }
    }
}

template <class Kind, int M, int64_t Row = kPitch, int64_t Depth = 1>
void multiply_rows(
    int rows, const slot* left, const slot* right, int64_t depth, float* c, int64_t stride, const float* scales, bool add) {
    if constexpr (M > 0) {
        if (rows == M) multiply_panel<Kind, M, Row, Depth>(left, right, depth, c, stride, scales, add);
        else multiply_rows<Kind, M - 1, Row, Depth>(rows, left, right, depth, c, stride, scales, add);
    }
}

}  // namespace

}  // namespace kpt
