// Vectors of float32 and what turns numbers of other types into them, for the instruction set that is compiled for.
//
// GCC's vector extensions do the arithmetic, so that the kernels are written once; intrinsics are used where a conversion
// has an instruction. `W` floats make a vector: 16 with AVX-512, 8 with AVX2, 4 elsewhere.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kpt_cpu.h"

// What is this library's alone; each instruction set has a library of its own.
#define KPT_INLINE static inline __attribute__((always_inline))

namespace kpt {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define KPT_HAS_BF16_DOT 1
#else
#define KPT_HAS_BF16_DOT 0
#endif

#if KPT_HAS_BF16_DOT && defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define KPT_HAS_TILES 1
#else
#define KPT_HAS_TILES 0
#endif

typedef float vf __attribute__((vector_size(W * 4), may_alias));
typedef int32_t vi __attribute__((vector_size(W * 4), may_alias));
typedef uint32_t vu __attribute__((vector_size(W * 4), may_alias));
typedef float vf_anywhere __attribute__((vector_size(W * 4), may_alias, aligned(1)));
typedef uint16_t vh __attribute__((vector_size(W * 2), may_alias));
typedef uint16_t vh_anywhere __attribute__((vector_size(W * 2), may_alias, aligned(1)));
typedef uint8_t vb __attribute__((vector_size(W), may_alias));
typedef uint8_t vb_anywhere __attribute__((vector_size(W), may_alias, aligned(1)));

// Element types; the bits of what C++ has no type for.
struct bfloat16 { uint16_t bits; };
struct float16 { uint16_t bits; };
struct e4m3 { uint8_t bits; };
struct e5m2 { uint8_t bits; };

// Call `body` with a value of the type that `dtype` stands for.
template <class Body>
KPT_INLINE void with_float_type(int dtype, Body&& body) {
    if (dtype == KPT_FLOAT32) body(float{});
    else if (dtype == KPT_BFLOAT16) body(bfloat16{});
    else body(float16{});
}

template <class Body>
KPT_INLINE void with_type(int dtype, Body&& body) {
    if (dtype == KPT_FLOAT8_E4M3FN) body(e4m3{});
    else if (dtype == KPT_FLOAT8_E5M2) body(e5m2{});
    else with_float_type(dtype, static_cast<Body&&>(body));
}

KPT_INLINE int64_t size_of(int dtype) {
    return dtype == KPT_FLOAT32 ? 4 : dtype == KPT_BFLOAT16 || dtype == KPT_FLOAT16 ? 2 : 1;
}

KPT_INLINE vi splat_int(int32_t value) { return vi{} + value; }
// By its bits: adding zero would turn -0 into 0.
KPT_INLINE vf splat(float value) {
    int32_t bits;
    memcpy(&bits, &value, 4);
    return (vf)splat_int(bits);
}
KPT_INLINE vf as_floats(vi bits) { return (vf)bits; }
KPT_INLINE vi as_bits(vf values) { return (vi)values; }
KPT_INLINE vf select(vi mask, vf yes, vf no) { return mask ? yes : no; }
KPT_INLINE vf larger(vf a, vf b) { return a > b ? a : b; }
KPT_INLINE vf smaller(vf a, vf b) { return a < b ? a : b; }

// g++ has _Float16 on ARM from 13 on alone.
#if defined(__aarch64__)
typedef __fp16 half_float;
#else
typedef _Float16 half_float;
#endif

// One number each.

KPT_INLINE float widen(float value) { return value; }

KPT_INLINE float widen(bfloat16 value) {
    const uint32_t bits = uint32_t{value.bits} << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

KPT_INLINE float widen(float16 value) {
#if defined(__F16C__)
    return _cvtsh_ss(value.bits);
#else
    half_float half;
    memcpy(&half, &value.bits, 2);
    return static_cast<float>(half);
#endif
}

// e4m3fn has 4 bits of exponent with bias 7, no infinity, and NaN where all bits but the sign are set. Its bits moved into
// a float16 mean 2^-8 of it, subnormal numbers too.
KPT_INLINE float widen(e4m3 value) {
    const uint16_t low = value.bits & 0x7f;
    const float16 half{static_cast<uint16_t>((value.bits & 0x80) << 8 | low << 7)};
    return low == 0x7f ? __builtin_nanf("") : widen(half) * 256.0f;
}

KPT_INLINE float widen(e5m2 value) { return widen(float16{static_cast<uint16_t>(value.bits << 8)}); }

KPT_INLINE void narrow(float value, float* out) { *out = value; }

KPT_INLINE void narrow(float value, bfloat16* out) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    out->bits = is_nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

KPT_INLINE void narrow(float value, float16* out) {
#if defined(__F16C__)
    out->bits = _cvtss_sh(value, 0);
#else
    const half_float half = static_cast<half_float>(value);
    memcpy(&out->bits, &half, 2);
#endif
}

// Numbers at even and at odd places of two vectors.
KPT_INLINE void deinterleave(vf low, vf high, vf& even, vf& odd) {
    float all[2 * W];
    memcpy(all, &low, sizeof low);
    memcpy(all + W, &high, sizeof high);
    for (int i = 0; i < W; i++) {
        even[i] = all[2 * i];
        odd[i] = all[2 * i + 1];
    }
}

// W numbers at any address.

KPT_INLINE vf load(const float* p) { return *reinterpret_cast<const vf_anywhere*>(p); }

KPT_INLINE vf load(const bfloat16* p) {
    const vh bits = *reinterpret_cast<const vh_anywhere*>(p);
    return as_floats(__builtin_convertvector(bits, vi) << 16);
}

KPT_INLINE vf widen_halves(vh bits) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__F16C__) && defined(__AVX2__)
    return (vf)_mm256_cvtph_ps((__m128i)bits);
#else
    const vi wide = __builtin_convertvector(bits, vi);
    const vi magnitude = (wide & 0x7fff) << 13;
    const vi infinite = magnitude >= 0x0f800000;
    const vf normal = as_floats(magnitude + (112 << 23) + (infinite & 112 << 23));
    const vf subnormal = as_floats(magnitude + (113 << 23)) - 6.103515625e-5f;
    const vf out = select(magnitude < 1 << 23, subnormal, normal);
    return as_floats(as_bits(out) | (wide & 0x8000) << 16);
#endif
}

KPT_INLINE vf load(const float16* p) { return widen_halves(*reinterpret_cast<const vh_anywhere*>(p)); }

// W numbers of 8 bits as float16, those of e4m3 as a 256th.

KPT_INLINE vh halves(const e4m3* p) {
    typedef int8_t vsb __attribute__((vector_size(W)));
    typedef int16_t vsh __attribute__((vector_size(W * 2)));
    // The sign is in bit 14 too, which is the highest of the exponent. Where all of what stands below is set, it becomes NaN.
    const vh half = (vh)__builtin_convertvector((vsb)*reinterpret_cast<const vb_anywhere*>(p), vsh) << 7 & 0xbfff;
    return half | ((half + 0x80) & 0x4000);
}

KPT_INLINE vh halves(const e5m2* p) {
    return __builtin_convertvector(*reinterpret_cast<const vb_anywhere*>(p), vh) << 8;
}

// A 256th of W numbers, for who can multiply by 256 later.
KPT_INLINE vf load_256th(const e4m3* p) { return widen_halves(halves(p)); }

KPT_INLINE vf load(const e4m3* p) { return load_256th(p) * 256.0f; }

KPT_INLINE vf load(const e5m2* p) { return widen_halves(halves(p)); }

KPT_INLINE void store(float* p, vf value) { *reinterpret_cast<vf_anywhere*>(p) = value; }

KPT_INLINE void store(bfloat16* p, vf value) {
#if KPT_HAS_BF16_DOT
    *reinterpret_cast<vh_anywhere*>(p) = (vh)_mm512_cvtneps_pbh((__m512)value);
#else
    const vu bits = (vu)value;
    const vi is_nan = (vi)((bits & 0x7fffffffu) > 0x7f800000u);
    const vu rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    const vu quiet = bits >> 16 | 0x40u;
    const vu out = (rounded & (vu)~is_nan) | (quiet & (vu)is_nan);
    *reinterpret_cast<vh_anywhere*>(p) = __builtin_convertvector(out, vh);
#endif
}

KPT_INLINE void store(float16* p, vf value) {
#if defined(__AVX512F__)
    *reinterpret_cast<vh_anywhere*>(p) = (vh)_mm512_cvtps_ph((__m512)value, 0);
#elif defined(__F16C__) && defined(__AVX2__)
    *reinterpret_cast<vh_anywhere*>(p) = (vh)_mm256_cvtps_ph((__m256)value, 0);
#else
    for (int i = 0; i < W; i++) narrow(value[i], p + i);
#endif
}

// The first `count` of W numbers, the rest zero; nothing past them is touched.

template <class T>
KPT_INLINE vf load(const T* p, int64_t count) {
    if (count >= W) return load(p);
    T some[W] = {};
    memcpy(some, p, count * sizeof(T));
    return load(some);
}

#if defined(__AVX512F__)
KPT_INLINE vf load(const float* p, int64_t count) {
    return (vf)_mm512_maskz_loadu_ps(count >= W ? 0xffff : (1u << count) - 1, p);
}
#endif

template <class T>
KPT_INLINE void store(T* p, vf value, int64_t count) {
    if (count >= W) {
        store(p, value);
        return;
    }
    T some[W];
    store(some, value);
    memcpy(p, some, count * sizeof(T));
}

#if defined(__AVX512F__)
KPT_INLINE void store(float* p, vf value, int64_t count) {
    _mm512_mask_storeu_ps(p, count >= W ? 0xffff : (1u << count) - 1, (__m512)value);
}
#endif

KPT_INLINE float sum_of(vf value) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)value);
#elif defined(__AVX2__)
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)value), _mm256_extractf128_ps((__m256)value, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    float parts[W];
    store(parts, value);
    for (int step = W / 2; step > 0; step /= 2) {
        for (int i = 0; i < step; i++) parts[i] += parts[i + step];
    }
    return parts[0];
#endif
}

KPT_INLINE void sums_of_four(const vf* v, float* out) {
#if defined(__AVX512F__)
    const auto halves = [](vf a, vf b) {
        return _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
    };
    const __m512d ab = (__m512d)halves(v[0], v[1]), cd = (__m512d)halves(v[2], v[3]);
    const __m512 lanes = _mm512_add_ps((__m512)_mm512_unpacklo_pd(ab, cd), (__m512)_mm512_unpackhi_pd(ab, cd));
    const __m256 two = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
#elif defined(__AVX2__)
    const __m256 ab = _mm256_hadd_ps((__m256)v[0], (__m256)v[1]), cd = _mm256_hadd_ps((__m256)v[2], (__m256)v[3]);
    const __m256 lanes = _mm256_hadd_ps(ab, cd);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1)));
#else
    for (int j = 0; j < 4; j++) out[j] = sum_of(v[j]);
#endif
}

}  // namespace kpt
