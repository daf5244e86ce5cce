// What attention computes of its scores.
#pragma once

#include "activation.h"

namespace kpt {

// exp(x) of what is at most about zero, within 1 ulp or so: zero below -87.3, where it would be subnormal; NaN stays.
KPT_INLINE vf exp_of_loss(vf x) {
#if defined(__AVX512F__)
    const vf bounded = larger(splat(-88.0f), x);
    const vf magic = splat(12582912.0f);
    const vf n = bounded * 1.44269504f + magic - magic;
    const vf r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = splat(1.38949632e-3f);
    p = p * r + 8.37019261e-3f;
    p = p * r + 4.16687857e-2f;
    p = p * r + 1.66664511e-1f;
    p = p * r + 0.499999851f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.3f), _CMP_NLT_UQ);
    return (vf)_mm512_maskz_scalef_ps(counts, (__m512)p, (__m512)n);
#else
    return exp(x);
#endif
}

// Within 2 ulp or so, near zero too (the polynomial is of S. Moshier's Cephes).
KPT_INLINE vf tanh(vf x) {
    const vf magnitude = abs(x), square = x * x;
    const vf e = exp(magnitude * 2.0f);
    const vf far = as_floats(as_bits(1.0f - 2.0f / (e + 1.0f)) | (as_bits(x) & INT32_MIN));
    vf near = splat(-5.70498872745e-3f);
    near = near * square + 2.06390887954e-2f;
    near = near * square + -5.37397155531e-2f;
    near = near * square + 1.33314422036e-1f;
    near = near * square + -3.33332819422e-1f;
    near = near * square * x + x;
    return select(magnitude < 0.625f, near, far);
}

}  // namespace kpt
