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

// Numbers that are multiplied as they are, NaN too.
struct AsTheyAre {
    // What the weights are multiples of.
    static constexpr float unit = 1.0f;
    struct Watch {
        KPT_INLINE void see(Watch&, const void*) {}
        KPT_INLINE bool alarmed(const Watch&) { return false; }
        KPT_INLINE bool has_nan(const void*, int64_t) { return false; }
    };
};

// In float32, from any weights.
template <class T>
struct FloatDot : AsTheyAre {
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

#if defined(__AVX2__)

constexpr int64_t codes_at_once = 4 * W;

template <class T>
struct HalfUnits : AsTheyAre {
    static constexpr int shift = 8;
    static constexpr int16_t mask = -1;
};

// Moved into a float16 e4m3 means a 256th; the copy of the sign in bit 14 is taken out. NaN becomes 480: to keep the
// greatest code, whatever its sign, and to look for NaN if that is one costs less than to mend each.
template <>
struct HalfUnits<e4m3> {
    static constexpr int shift = 7;
    static constexpr int16_t mask = -0x4001;
    static constexpr float unit = 256.0f;
    struct Watch {
        typedef uint8_t vector __attribute__((vector_size(codes_at_once), may_alias));
        typedef uint8_t anywhere __attribute__((vector_size(codes_at_once), may_alias, aligned(1)));
        typedef uint64_t quads __attribute__((vector_size(codes_at_once), may_alias));
        vector greatest = {};
        KPT_INLINE void see(Watch& watch, const e4m3* p) {
            const vector codes = *reinterpret_cast<const anywhere*>(p) | 0x80;
            watch.greatest = codes > watch.greatest ? codes : watch.greatest;
        }
        KPT_INLINE bool alarmed(const Watch& watch) {
            const quads found = (quads)(watch.greatest == 0xff);
            uint64_t any = 0;
            for (int i = 0; i < codes_at_once / 8; i++) any |= found[i];
            return any != 0;
        }
        static bool has_nan(const e4m3* p, int64_t count) {
            bool found = false;
            for (int64_t i = 0; i < count; i++) found |= (p[i].bits & 0x7f) == 0x7f;
            return found;
        }
    };
};

// In float32, from weights of 8 bits by way of float16. These are stored and loaded again: a conversion from memory is
// one operation, that of the upper half of a register three.
template <class T>
struct HalfDot : HalfUnits<T> {
    using Weight = T;
    using Staged = float;
    using Vector = vh;
    using Decoded = FloatDot<float>;
    static constexpr int vectors = 4;
    static constexpr int64_t numbers = codes_at_once;
    static constexpr bool buffers = true;
    static constexpr int most_rows = tile_rows_decoding;
    static constexpr int wide_rows = most_rows;
    KPT_INLINE void get(const T* p, vh* out) {
        typedef int16_t pair __attribute__((vector_size(4 * W), may_alias));
        for (int v = 0; v < vectors; v += 2) {
#if defined(__AVX512F__)
            const auto wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + v * W)));
#else
            const auto wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + v * W)));
#endif
            *reinterpret_cast<pair*>(out + v) = (pair)wide << HalfUnits<T>::shift & HalfUnits<T>::mask;
        }
        // Else the compiler takes them from the registers.
        asm("" : "+m"(*reinterpret_cast<vh(*)[vectors]>(out)));
    }
    // The same, with NaN.
    KPT_INLINE void get(const T* p, int64_t count, vh* out) {
        T some[numbers] = {};
        if (count < numbers) memcpy(some, p, count * sizeof(T));
        const T* from = count < numbers ? some : p;
        for (int v = 0; v < vectors; v++) out[v] = halves(from + v * W);
    }
    KPT_INLINE vf get_x(const float* p) { return load(p); }
    KPT_INLINE vf dot(vf sum, vf x, vh w) { return sum + x * widen_halves(w); }
    KPT_INLINE void keep(float* p, vh w) { store(p, widen_halves(w)); }
};

#endif

#if KPT_HAS_BF16_DOT

template <class T>
inline constexpr bool is_bfloat16 = false;
template <>
inline constexpr bool is_bfloat16<bfloat16> = true;

// Pairs of bfloat16 summed in float32, from weights of 8 bits.
template <class T>
struct Bfloat16Dot : AsTheyAre {
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
struct Bfloat16Dot<bfloat16> : AsTheyAre {
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
