// The cumulative normal distribution by a table, with AVX-512: a third of what erf costs.
//
// 32 runs of a distance of 3/16, in each a polynomial of degree 4 through the distribution at Chebyshev's nodes: within
// 5e-9 of it, and within 6.2e-8 when computed in float32, as erf in float32 is. Registers hold the table.
#pragma once

#include "simd.h"

#if defined(__AVX512F__)

namespace kpt {

constexpr int kNormalRuns = 32, kNormalTerms = 5;
constexpr double kNormalStep = 3.0 / 16;

// [term][run] of polynomials in the distance from the run's middle, in steps.
struct NormalTable {
    alignas(64) float terms[kNormalTerms][kNormalRuns];
};

// The distribution less 1/2: the density by t + t^3 / 3 + t^5 / (3 * 5) + ...
constexpr double normal_above_half(double t) {
    constexpr int halvings = 10;
    const double exponent = -t * t / 2 / (1 << halvings);
    double density = 1 + exponent * (1 + exponent / 2 * (1 + exponent / 3 * (1 + exponent / 4)));
    for (int i = 0; i < halvings; i++) density *= density;
    double term = t, sum = t;
    for (int n = 3; n < 250; n += 2) {
        term *= t * t / n;
        sum += term;
    }
    return density * sum * 0.3989422804014327;
}

constexpr NormalTable normal_table_of() {
    NormalTable table{};
    // The nodes are 0 and these, to both sides.
    constexpr double a = 0.47552825814757677, b = 0.29389262614623657;
    for (int run = 0; run < kNormalRuns; run++) {
        const double middle = run * kNormalStep, at_middle = normal_above_half(middle);
        double even[2] = {}, odd[2] = {};
        for (int i = 0; i < 2; i++) {
            const double node = i == 0 ? a : b;
            const double above = normal_above_half(middle + node * kNormalStep);
            const double below = normal_above_half(middle - node * kNormalStep);
            even[i] = ((above + below) / 2 - at_middle) / (node * node);
            odd[i] = (above - below) / (2 * node);
        }
        const double fourth = (even[0] - even[1]) / (a * a - b * b), third = (odd[0] - odd[1]) / (a * a - b * b);
        const double terms[kNormalTerms] = {at_middle, odd[0] - third * a * a, even[0] - fourth * a * a, third, fourth};
        for (int term = 0; term < kNormalTerms; term++) table.terms[term][run] = static_cast<float>(terms[term]);
    }
    return table;
}

inline constexpr NormalTable normal_table = normal_table_of();

KPT_INLINE vf cumulative_normal(vf x) {
    constexpr float runs_per_one = static_cast<float>(1 / kNormalStep);
    const vf t = smaller(splat(static_cast<float>((kNormalRuns - 1) * kNormalStep)), as_floats(as_bits(x) & 0x7fffffff));
    // Adding 1.5 * 2^23 rounds to an integer, the run, which then is in the low bits.
    const vf magic = splat(12582912.0f);
    const vf shifted = t * runs_per_one + magic;
    const vf r = t * runs_per_one - (shifted - magic);
    const auto term = [&](int i) {
        const float* terms = normal_table.terms[i];
        return (vf)_mm512_permutex2var_ps(
            _mm512_load_ps(terms), (__m512i)as_bits(shifted), _mm512_load_ps(terms + kNormalRuns / 2));
    };
    const vf above = (((term(4) * r + term(3)) * r + term(2)) * r + term(1)) * r + term(0);
    return as_floats(as_bits(above) | (as_bits(x) & INT32_MIN)) + 0.5f;
}

}  // namespace kpt

#endif
