// Calls of moe.experts: what may be asked, the activations in float64, and inputs at random.
#pragma once

#include <algorithm>
#include <cmath>

#include "tensors.h"

namespace test {

inline constexpr const char* activation_names[] = {"swiglu", "geglu",     "geglu_tanh", "reglu", "silu",
                                                   "gelu",   "gelu_tanh", "relu",       "relu2"};
inline constexpr const char* scale_names[] = {"none", "of N", "of K", "of blocks"};

struct ExpertsCase {
    int dtype, weight_dtype, scales_of, weights_dtype, act;
    bool interleaved, limited, n_contiguous, up_bias, down_bias, int64, gaps;
    int64_t tokens, top_k, experts, hidden, intermediate;
    int threads;
    bool gated() const { return act <= KPT_REGLU; }
    int64_t width() const { return gated() ? 2 * intermediate : intermediate; }
    int64_t pairs() const { return tokens * top_k; }
    int64_t gate(int64_t i) const { return interleaved && gated() ? 2 * i : i; }
    int64_t up(int64_t i) const { return interleaved ? 2 * i + 1 : intermediate + i; }
};

inline void begin_experts(const char* kernel, const ExpertsCase& c) {
    begin_case(
        "%s of %s, %lld tokens, top_k %lld, %lld experts, hidden %lld, intermediate %lld, weights %s with %s "
        "contiguous, "
        "scales %s, routing weights %s, %s%s%s, bias of up %d, of down %d, ids of %d bits, gaps %d, %d threads",
        kernel, name_of(c.dtype), static_cast<long long>(c.tokens), static_cast<long long>(c.top_k),
        static_cast<long long>(c.experts), static_cast<long long>(c.hidden), static_cast<long long>(c.intermediate),
        name_of(c.weight_dtype), c.n_contiguous ? "N" : "K", scale_names[c.scales_of], name_of(c.weights_dtype),
        activation_names[c.act], c.interleaved ? " interleaved" : "", c.limited ? " limited" : "", c.up_bias,
        c.down_bias, c.int64 ? 64 : 32, c.gaps, c.threads);
}

// Value and derivatives by gate and up.
struct Activated {
    double value, by_gate, by_up;
};

inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// f and f'.
inline void function(int kind, double x, double& value, double& slope) {
    switch (kind) {
        case KPT_GEGLU:
        case KPT_GELU: {
            const double below = 0.5 * (1.0 + std::erf(x / std::sqrt(2.0)));
            value = x * below;
            slope = below + x * std::exp(-0.5 * x * x) / std::sqrt(2.0 * M_PI);
            break;
        }
        case KPT_GEGLU_TANH:
        case KPT_GELU_TANH: {
            const double c = std::sqrt(2.0 / M_PI), t = std::tanh(c * (x + 0.044715 * x * x * x));
            value = 0.5 * x * (1.0 + t);
            slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * c * (1.0 + 3.0 * 0.044715 * x * x);
            break;
        }
        case KPT_REGLU:
        case KPT_RELU:
            value = x > 0.0 ? x : 0.0;
            slope = x > 0.0 ? 1.0 : 0.0;
            break;
        case KPT_RELU2:
            value = x > 0.0 ? x * x : 0.0;
            slope = x > 0.0 ? 2.0 * x : 0.0;
            break;
        default:
            value = x * sigmoid(x);
            slope = sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x)));
    }
}

inline Activated activate(const kpt_activation_settings& act, double gate, double up) {
    if (act.kind == KPT_SWIGLU) {
        const double limit = act.limited ? static_cast<double>(act.limit) : INFINITY;
        const double g = std::min(gate, limit), u = std::max(-limit, std::min(limit, up));
        const double alpha = static_cast<double>(act.alpha), beta = static_cast<double>(act.beta),
                     s = sigmoid(alpha * g);
        return {
            g * s * (u + beta), gate > limit ? 0.0 : s * (1.0 + alpha * g * (1.0 - s)) * (u + beta),
            std::fabs(up) > limit ? 0.0 : g * s};
    }
    double value, slope;
    function(act.kind, gate, value, slope);
    if (act.kind > KPT_REGLU) return {value, slope, 0.0};
    return {value * up, slope * up, value};
}

// The error of an activation or its derivative in float32, over what multiplies it.
inline double error_of(double gate) { return 0x1p-20 * (1.0 + std::fabs(gate) + gate * gate); }

struct ExpertsInputs {
    Rows x, weights, up_bias, down_bias;
    Matrices up, down;
    std::vector<int64_t> ids;
    Array<int64_t> long_ids;
    Array<int32_t> int_ids, order, offsets;
    std::vector<int32_t> sorted, ends;
    kpt_activation_settings act;

    ExpertsInputs(Random& random, const ExpertsCase& c) {
        const int64_t gap = c.gaps ? 3 : 0;
        const double range = 1.7 / std::sqrt(static_cast<double>(c.hidden)),
                     down_range = 1.7 / std::sqrt(static_cast<double>(c.intermediate));
        x = Rows::random(random, c.dtype, c.tokens, c.hidden, c.gaps ? 5 : 0, 2.0);
        weights = Rows::random(random, c.weights_dtype, c.tokens, c.top_k, 0, 1.0);
        up_bias = Rows::random(random, c.dtype, c.experts, c.width(), gap, 0.5);
        down_bias = Rows::random(random, c.dtype, c.experts, c.hidden, gap, 0.5);
        up = Matrices::random(
            random, c.weight_dtype, c.experts, c.hidden, c.width(), c.n_contiguous, gap, c.scales_of, range);
        down = Matrices::random(
            random, c.weight_dtype, c.experts, c.intermediate, c.hidden, c.n_contiguous, gap, c.scales_of, down_range);
        const int kind = static_cast<int>(random.below(4));
        for (int64_t i = 0; i < c.pairs(); i++) {
            // Everywhere, out of range too; all to one expert; nowhere.
            ids.push_back(
                kind == 0                                 ? c.experts / 2
                : kind == 1 && c.tokens > 3 && i % 2 == 0 ? -1
                                                          : random.below(c.experts + 2) - 1);
        }
        for (int64_t e = 0; e < c.experts; e++) {
            for (int64_t i = 0; i < c.pairs(); i++) {
                if (ids[i] == e) sorted.push_back(static_cast<int32_t>(i));
            }
            ends.push_back(static_cast<int32_t>(sorted.size()));
        }
        for (int64_t i = 0; i < c.pairs(); i++) {
            if (ids[i] < 0 || ids[i] >= c.experts) sorted.push_back(static_cast<int32_t>(i));
        }
        long_ids = Array<int64_t>(ids);
        int_ids = Array<int32_t>(std::vector<int32_t>(ids.begin(), ids.end()));
        order = Array<int32_t>(sorted);
        offsets = Array<int32_t>(ends);
        const bool swiglu = c.act == KPT_SWIGLU, odd = swiglu && c.limited;
        act = {c.act, c.interleaved && c.gated(), odd, odd ? 1.702f : 1.0f, odd ? 1.0f : 0.0f, odd ? 0.8f : 0.0f};
        for (Memory* memory :
             {&x.memory, &weights.memory, &up_bias.memory, &down_bias.memory, &up.memory, &down.memory}) {
            memory->freeze();
        }
        up.scale.freeze();
        down.scale.freeze();
        long_ids.freeze();
        int_ids.freeze();
        order.freeze();
        offsets.freeze();
    }

    kpt_experts arguments(const ExpertsCase& c, const kpt_rows& out, const kpt_rows& h, bool with_order) const {
        return {
            x.view(),
            out,
            c.int64 ? static_cast<const void*>(long_ids.data()) : int_ids.data(),
            c.int64,
            weights.view(),
            up.view(),
            down.view(),
            up_bias.view_or_null(c.up_bias),
            down_bias.view_or_null(c.down_bias),
            act,
            with_order ? order.data() : nullptr,
            with_order ? offsets.data() : nullptr,
            h,
            c.tokens,
            c.top_k,
            c.experts,
            c.hidden,
            c.width(),
            c.intermediate,
            c.threads};
    }
};

inline double sum_error(int64_t count) { return 0x1p-24 * (static_cast<double>(count) + 16.0); }

inline ExpertsCase draw_experts_case(Random& random, int dtype, int act, double most) {
    constexpr int64_t tokens[] = {0, 1, 1, 2, 3, 4, 7, 23, 40, 65, 140, 300};
    constexpr int64_t hidden[] = {1, 3, 8, 15, 17, 33, 64, 65, 129, 130, 200, 260, 300};
    constexpr int64_t intermediate[] = {1, 5, 8, 16, 31, 33, 64, 72, 129, 140, 200, 260};
    constexpr int64_t experts[] = {1, 2, 5, 8};
    constexpr int small[] = {KPT_FLOAT8_E4M3FN, KPT_FLOAT8_E5M2};
    ExpertsCase c{};
    c.dtype = c.weight_dtype = dtype;
    c.act = act;
    if (random.coin()) {
        c.weight_dtype = random.one_of(small);
        // Scales of K come from transposing a product alone.
        c.scales_of = random.coin() ? KPT_SCALES_N : KPT_SCALES_BLOCK;
    }
    c.weights_dtype = random.coin() ? dtype : static_cast<int>(random.below(3));
    c.interleaved = c.gated() && random.coin();
    c.limited = random.coin();
    c.n_contiguous = random.coin();
    c.up_bias = random.coin();
    c.down_bias = random.coin();
    c.int64 = random.coin();
    c.gaps = random.coin();
    c.threads = random.coin() ? 3 : 1;
    do {
        c.tokens = random.one_of(tokens);
        c.top_k = 1 + random.below(8);
        c.experts = random.one_of(experts);
        c.hidden = random.one_of(hidden);
        c.intermediate = random.one_of(intermediate);
    } while (static_cast<double>(c.pairs() + c.experts) * c.hidden * (c.width() + c.intermediate) > most);
    return c;
}

// Rows so many and wide that intermediate results are kept for a group of them at a time; some experts have none.
inline ExpertsCase draw_groups_case(Random& random) {
    ExpertsCase c = draw_experts_case(random, KPT_FLOAT32, KPT_SWIGLU, 1e5);
    c.weight_dtype = KPT_FLOAT32;
    c.scales_of = KPT_SCALES_NONE;
    c.limited = false;
    c.tokens = 1000;
    c.top_k = 2;
    c.experts = 600;
    c.hidden = 1;
    c.intermediate = 2048;
    c.threads = 3;
    return c;
}

// Ten rows of each expert, which tiles multiply turned; blocks of scales that end in the middle of the up projection.
inline ExpertsCase draw_turned_case(Random& random) {
    ExpertsCase c = draw_experts_case(random, KPT_BFLOAT16, KPT_SWIGLU, 1e5);
    c.weight_dtype = KPT_FLOAT8_E4M3FN;
    c.scales_of = KPT_SCALES_BLOCK;
    c.interleaved = c.n_contiguous = false;
    c.tokens = 40;
    c.top_k = 2;
    c.experts = 8;
    c.hidden = 300;
    c.intermediate = 100;
    return c;
}

// Columns of a down projection that decoding takes in several steps, since many rows are one expert's; all of one projection
// in parts as large as they may be.
inline ExpertsCase draw_wide_case(Random& random, int dtype, bool many_experts) {
    ExpertsCase c = draw_experts_case(random, dtype, KPT_SWIGLU, 1e5);
    c.weight_dtype = dtype;
    c.scales_of = KPT_SCALES_NONE;
    c.limited = c.n_contiguous = false;
    c.tokens = many_experts ? 8 : 250;
    c.top_k = many_experts ? 4 : 1;
    c.experts = many_experts ? 8 : 1;
    c.hidden = 520;
    c.intermediate = many_experts ? 660 : 36;
    c.threads = 1;
    return c;
}

constexpr int experts_dtypes[] = {KPT_FLOAT32, KPT_BFLOAT16, KPT_FLOAT16};

}  // namespace test
