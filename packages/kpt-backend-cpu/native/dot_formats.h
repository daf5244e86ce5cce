// How weights of each dtype are multiplied, and how many rows of x and of them fit into the registers.
#pragma once

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
constexpr bool is_bfloat16 = false;
template <>
constexpr bool is_bfloat16<bfloat16> = true;

// The low and the high bytes of the bfloat16 numbers that the 128 magnitudes of an 8-bit format are.
struct ByteTables {
    alignas(64) uint8_t low[128], high[128];
};

constexpr ByteTables tables_of(int mantissa_bits, int bias, bool has_infinity) {
    ByteTables tables{};
    const int tops = 1 << mantissa_bits;
    for (int code = 0; code < 128; code++) {
        int exponent = code >> mantissa_bits, mantissa = code & (tops - 1);
        uint16_t bits = 0;
        if (has_infinity ? exponent == 31 : code == 127) {
            bits = has_infinity && mantissa == 0 ? 0x7f80 : 0x7fc0;
        } else if (code > 0) {
            if (exponent == 0) {
                for (exponent = 1; mantissa < tops; mantissa *= 2) exponent--;
                mantissa -= tops;
            }
            bits = static_cast<uint16_t>((exponent - bias + 127) << 7 | mantissa << (7 - mantissa_bits));
        }
        tables.low[code] = static_cast<uint8_t>(bits);
        tables.high[code] = static_cast<uint8_t>(bits >> 8);
    }
    return tables;
}

template <class T>
constexpr ByteTables byte_tables = tables_of(3, 7, false);
template <>
constexpr ByteTables byte_tables<e5m2> = tables_of(2, 15, true);

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
        const ByteTables& tables = byte_tables<T>;
        const auto look_up = [&](const uint8_t* table) {
            return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
        };
        const __m512i low = look_up(tables.low);
        // high | (codes & 0x80)
        const __m512i high = _mm512_ternarylogic_epi32(look_up(tables.high), codes, _mm512_set1_epi8(-128), 0xf8);
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
