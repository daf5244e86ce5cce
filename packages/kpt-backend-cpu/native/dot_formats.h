// How weights of each dtype are multiplied, and how many rows of x and of them fit into the registers.
#pragma once

#include "byte_tables.h"
#include "dot.h"

namespace kpt {

namespace {

constexpr int tile_columns = 4;
#if defined(__AVX512F__)
constexpr int tile_rows = 6;
constexpr int tile_rows_decoding = 4;
#else
constexpr int tile_rows = 2;
constexpr int tile_rows_decoding = 2;
#endif
// The same for two columns.
constexpr int tall_rows = 8;

// In float32, from any weights.
template <class T>
struct FloatDot {
    using Weight = T;
    using Staged = float;
    using Vector = vf;
    using Decoded = FloatDot<float>;
    static constexpr int64_t numbers = W;
    static constexpr int vectors = 1;
    static constexpr bool buffers = sizeof(T) != 4;
    static constexpr int most_rows = buffers ? tile_rows_decoding : tile_rows;
    static constexpr int wide_rows = most_rows;
    static void get(const T* p, vf* out) { out[0] = load(p); }
    static void get(const T* p, int64_t count, vf* out) { out[0] = load(p, count); }
    static vf get_x(const float* p) { return load(p); }
    static vf dot(vf sum, vf x, vf w) { return sum + x * w; }
    static void keep(float* p, vf w) { store(p, w); }
};

#if KPT_HAS_BF16_DOT

template <class T>
inline constexpr bool is_bfloat16 = false;
template <>
inline constexpr bool is_bfloat16<bfloat16> = true;

// Pairs of bfloat16 summed in float32, from weights of 8 bits.
template <class T>
struct Bfloat16Dot {
    using Weight = T;
    using Staged = bfloat16;
    using Vector = __m512i;
    using Decoded = Bfloat16Dot<bfloat16>;
    static constexpr int64_t numbers = 64;
    static constexpr int vectors = 2;
    static constexpr bool buffers = false;
    static constexpr int most_rows = tall_rows;
    static constexpr int wide_rows = tile_rows_decoding;
    KPT_INLINE void decode(__m512i codes, __m512i* out) {
        __m512i low, high;
        bytes_of<T>(codes, low, high);
        out[0] = _mm512_unpacklo_epi8(low, high);
        out[1] = _mm512_unpackhi_epi8(low, high);
    }
    KPT_INLINE void get(const T* p, __m512i* out) { decode(_mm512_loadu_si512(p), out); }
    KPT_INLINE void get(const T* p, int64_t count, __m512i* out) {
        decode(_mm512_maskz_loadu_epi8((uint64_t{1} << count) - 1, p), out);
    }
    KPT_INLINE __m512i get_x(const bfloat16* p) { return _mm512_loadu_si512(p); }
    KPT_INLINE vf dot(vf sum, __m512i x, __m512i w) {
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
    }
    KPT_INLINE void keep(bfloat16* p, __m512i w) { _mm512_storeu_si512(p, w); }
};

template <>
struct Bfloat16Dot<bfloat16> {
    using Weight = bfloat16;
    using Staged = bfloat16;
    using Vector = __m512i;
    using Decoded = Bfloat16Dot<bfloat16>;
    static constexpr int64_t numbers = 32;
    static constexpr int vectors = 1;
    static constexpr bool buffers = false;
    static constexpr int most_rows = tile_rows;
    static constexpr int wide_rows = most_rows;
    KPT_INLINE void get(const bfloat16* p, __m512i* out) { out[0] = _mm512_loadu_si512(p); }
    KPT_INLINE void get(const bfloat16* p, int64_t count, __m512i* out) {
        out[0] = _mm512_maskz_loadu_epi16((uint32_t{1} << count) - 1, p);
    }
    KPT_INLINE __m512i get_x(const bfloat16* p) { return _mm512_loadu_si512(p); }
    KPT_INLINE vf dot(vf sum, __m512i x, __m512i w) {
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
    }
    KPT_INLINE void keep(bfloat16* p, __m512i w) { _mm512_storeu_si512(p, w); }
};

#endif

}  // namespace

}  // namespace kpt
