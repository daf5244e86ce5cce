// Numbers of 8 bits as bfloat16, which holds all of them exactly, by looking them up: the 128 magnitudes are two tables of
// bytes.
#pragma once

#include "simd.h"

#if KPT_HAS_BF16_DOT

namespace kpt {

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
inline constexpr ByteTables byte_tables = tables_of(3, 7, false);
template <>
inline constexpr ByteTables byte_tables<e5m2> = tables_of(2, 15, true);

// The low and the high bytes of 64 numbers.
template <class T>
KPT_INLINE void bytes_of(__m512i codes, __m512i& low, __m512i& high) {
    const ByteTables& tables = byte_tables<T>;
    const auto look_up = [&](const uint8_t* table) {
        return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
    };
    low = look_up(tables.low);
    // high | (codes & 0x80)
    high = _mm512_ternarylogic_epi32(look_up(tables.high), codes, _mm512_set1_epi8(-128), 0xf8);
}

// Interleaving takes the lower half of each quarter, then the upper.
KPT_INLINE __m512i spread(__m512i codes) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), codes);
}

// 64 numbers, in their order.
template <class T>
KPT_INLINE void bfloat16_of(__m512i codes, __m512i* out) {
    __m512i low, high;
    bytes_of<T>(spread(codes), low, high);
    out[0] = _mm512_unpacklo_epi8(low, high);
    out[1] = _mm512_unpackhi_epi8(low, high);
}

// 32 numbers, in their order.
template <class T>
KPT_INLINE __m512i bfloat16_of(__m256i codes) {
    __m512i low, high;
    bytes_of<T>(spread(_mm512_castsi256_si512(codes)), low, high);
    return _mm512_unpacklo_epi8(low, high);
}

}  // namespace kpt

#endif
