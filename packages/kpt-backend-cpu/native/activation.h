// Activations of experts and their derivatives: what `kpt_moe.activations` computes, a vector at a time.
#pragma once

#include "normal.h"

namespace kpt {

KPT_INLINE vf abs(vf x) { return as_floats(as_bits(x) & 0x7fffffff); }

// Within 1 ulp or so; zero where the result would be subnormal, since those are slow.
KPT_INLINE vf exp(vf x) {
    const vf bounded = larger(splat(-88.0f), smaller(splat(89.0f), x));
    // Adding 1.5 * 2^23 rounds to an integer, which then is in the low bits.
    const vf magic = splat(12582912.0f);
    const vf shifted = bounded * 1.44269504f + magic;
    const vf n = shifted - magic;
    const vf r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = splat(1.38949632e-3f);
    p = p * r + 8.37019261e-3f;
    p = p * r + 4.16687857e-2f;
    p = p * r + 1.66664511e-1f;
    p = p * r + 0.499999851f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
#if defined(__AVX512F__)
    const vf out = (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    const vf scaled = as_floats(as_bits(p) + ((as_bits(shifted) - as_bits(magic)) << 23));
    const vf finite = select(x > 88.7228394f, splat(__builtin_inff()), scaled);
    const vf out = select(x != x, x, finite);
#endif
    return select(x < -87.3f, vf{}, out);
}

KPT_INLINE vf sigmoid(vf x) { return 1.0f / (1.0f + exp(-x)); }

// A sigmoid and what it lacks of 1, both to their last digits: near 1 a subtraction would leave the rest none.
struct Logistic {
    vf value, rest;
};

KPT_INLINE Logistic logistic(vf x) {
    const vf e = exp(-x);
    const vf value = 1.0f / (1.0f + e);
    return {value, select(x > 0.0f, e * value, 1.0f - value)};
}

#if !defined(__AVX512F__)
// Within 1 ulp or so: a polynomial near zero, 1 - exp(polynomial) elsewhere (N. Juffa's).
KPT_INLINE vf erf(vf x) {
    const vf t = smaller(splat(10.0f), abs(x));
    const vf s = t * t;
    vf far = (splat(-1.72853470e-5f) * t + 3.83197126e-4f) * s + (splat(-3.88396438e-3f) * t + 2.42546219e-2f);
    far = far * t + -1.06777877e-1f;
    far = far * t + -6.34846687e-1f;
    far = far * t + -1.28717512e-1f;
    far = 1.0f - exp(far * t - t);
    vf near = splat(-5.96761703e-4f);
    near = near * s + 4.99119423e-3f;
    near = near * s + -2.67681349e-2f;
    near = near * s + 1.12819925e-1f;
    near = near * s + -3.76125336e-1f;
    near = near * s + 1.28379166e-1f;
    near = near * t + t;
    const vi sign = as_bits(x) & INT32_MIN;
    return as_floats(as_bits(select(t > 0.927734375f, far, near)) | sign);
}

KPT_INLINE vf cumulative_normal(vf x) { return erf(x * 0.707106781f) * 0.5f + 0.5f; }
#endif

// Functions of one number: value, and derivative.

struct Silu {
    vf value(vf x) const { return x * sigmoid(x); }
    vf slope(vf x) const {
        const Logistic s = logistic(x);
        return s.value + s.value * s.rest * x;
    }
};

struct Gelu {
    vf value(vf x) const { return x * cumulative_normal(x); }
    vf slope(vf x) const { return cumulative_normal(x) + x * (exp(x * x * -0.5f) * 0.398942280f); }
};

// (1 + tanh(u)) / 2 is sigmoid(2 u).
struct GeluTanh {
    static vf twice(vf x) { return x * (1.59576912f + 0.0713548163f * (x * x)); }
    vf value(vf x) const { return x * sigmoid(twice(x)); }
    vf slope(vf x) const {
        const Logistic s = logistic(twice(x));
        // Past the bounds the product with the rest is zero; squares of large x are infinite.
        const vf b = larger(splat(-30.0f), smaller(splat(30.0f), x));
        return s.value + s.value * s.rest * b * (1.59576912f + 0.214064449f * (b * b));
    }
};

struct Relu {
    vf value(vf x) const { return larger(vf{}, x); }
    vf slope(vf x) const { return select(x > 0.0f, splat(1.0f), vf{}); }
};

struct Relu2 {
    vf value(vf x) const { return larger(vf{}, x) * larger(vf{}, x); }
    vf slope(vf x) const { return 2.0f * larger(vf{}, x); }
};

// What an expert does between its two products, `gated` or not. `slope` gives the gradients of gate and up, given that
// of the value.

template <class Function>
struct Plain : Function {
    static constexpr bool gated = false;
    vf value(vf gate, vf) const { return Function::value(gate); }
    void slope(vf grad, vf gate, vf, vf& grad_gate, vf& grad_up) const {
        grad_gate = grad * Function::slope(gate);
        grad_up = vf{};
    }
};

template <class Function>
struct Gated : Function {
    static constexpr bool gated = true;
    vf value(vf gate, vf up) const { return Function::value(gate) * up; }
    void slope(vf grad, vf gate, vf up, vf& grad_gate, vf& grad_up) const {
        grad_gate = grad * up * Function::slope(gate);
        grad_up = grad * Function::value(gate);
    }
};

// The limit is infinite where there is none.
struct Swiglu {
    static constexpr bool gated = true;
    float alpha, beta, limit;

    vf value(vf gate, vf up) const {
        const vf g = smaller(splat(limit), gate);
        return g * sigmoid(g * alpha) * (bounded(up) + beta);
    }
    void slope(vf grad, vf gate, vf up, vf& grad_gate, vf& grad_up) const {
        const vf g = smaller(splat(limit), gate);
        const Logistic s = logistic(g * alpha);
        const vf slope_of_gate = s.value + s.value * s.rest * g * alpha;
        grad_gate = select(gate > limit, vf{}, grad * (bounded(up) + beta) * slope_of_gate);
        grad_up = select(abs(up) > limit, vf{}, grad * (g * s.value));
    }

private:
    vf bounded(vf up) const { return larger(splat(-limit), smaller(splat(limit), up)); }
};

// Call `body` with the activation; it is compiled once for each kind.
template <class Body>
KPT_INLINE void with_activation(const kpt_activation_settings& s, Body&& body) {
    switch (s.kind) {
        case KPT_SWIGLU: body(Swiglu{s.alpha, s.beta, s.limited ? s.limit : __builtin_inff()}); break;
        case KPT_GEGLU: body(Gated<Gelu>{}); break;
        case KPT_GEGLU_TANH: body(Gated<GeluTanh>{}); break;
        case KPT_REGLU: body(Gated<Relu>{}); break;
        case KPT_SILU: body(Plain<Silu>{}); break;
        case KPT_GELU: body(Plain<Gelu>{}); break;
        case KPT_GELU_TANH: body(Plain<GeluTanh>{}); break;
        case KPT_RELU: body(Plain<Relu>{}); break;
        default: body(Plain<Relu2>{}); break;
    }
}

}  // namespace kpt
