// Weights whose N is contiguous: eight rows of K at a time are added to all columns.
#pragma once

#include "dot.h"

namespace kpt {

namespace {

constexpr int k_at_once = 8;

// Add `K` rows of weights from k on to the columns begin..end, a range that shares a scale.
template <class T, int K>
KPT_INLINE void add_rows(const Product& p, int64_t k, int64_t begin, int64_t end, float scale) {
    const kpt_matrices& w = p.weight;
    const T* base = static_cast<const T*>(w.data) + p.expert * w.stride_e + k * w.stride_k;
    const T* next = k + 2 * K <= p.staging.inner ? base + K * w.stride_k : base;
    for (int64_t n = begin; n < end; n += W) {
        vf weights[K];
#pragma GCC unroll 8
        for (int i = 0; i < K; i++) {
            __builtin_prefetch(next + i * w.stride_k + n, 0, 2);
            weights[i] = load(base + i * w.stride_k + n, end - n);
        }
        for (int64_t m = 0; m < p.rows; m++) {
            const float* x = static_cast<const float*>(p.x[m]) + k;
            float* out = p.out + m * p.out_stride + n - p.begin;
            vf even = vf{}, odd = vf{};
#pragma GCC unroll 8
            for (int i = 0; i < K; i++) (i % 2 == 0 ? even : odd) += weights[i] * splat(x[i]);
            store(out, load(out, end - n) + (even + odd) * splat(scale), end - n);
        }
    }
}

template <class T>
void multiply_columns(const Product& p) {
    const kpt_matrices& w = p.weight;
    const bool blocks = w.scales_of == KPT_SCALES_BLOCK;
    for (int64_t m = 0; m < p.rows; m++) {
        for (int64_t n = 0; n < p.end - p.begin; n++) p.out[m * p.out_stride + n] = 0.0f;
    }
    for (int64_t k = 0; k < p.staging.inner;) {
        const bool many = k + k_at_once <= p.staging.inner;
        for (int64_t begin = p.begin, end; begin < p.end; begin = end) {
            end = blocks ? (begin / scale_block + 1) * scale_block : p.end;
            if (end > p.end) end = p.end;
            const float scale = !blocks ? 1.0f
                                        : w.scale[p.expert * w.stride_se + k / scale_block * w.stride_sk +
                                                  begin / scale_block * w.stride_sn];
            if (many) add_rows<T, k_at_once>(p, k, begin, end, scale);
            else add_rows<T, 1>(p, k, begin, end, scale);
        }
        k += many ? k_at_once : 1;
    }
    if (w.scales_of != KPT_SCALES_N) return;
    for (int64_t n = p.begin; n < p.end; n++) {
        const float scale = w.scale[p.expert * w.stride_se + n * w.stride_sn];
        for (int64_t m = 0; m < p.rows; m++) p.out[m * p.out_stride + n - p.begin] *= scale;
    }
}

}  // namespace

}  // namespace kpt
