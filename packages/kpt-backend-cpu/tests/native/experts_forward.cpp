// moe.experts against double loops, for few rows and for many.
// Beside each number goes a bound of its error, which follows from the rounding of the dtype at those places where
// kernels may round (and of float32 sums), through first derivatives.
#include "experts_case.h"

namespace test {

namespace {

void check_forward(Random& random, const ExpertsCase& c, bool keep_h) {
    begin_experts("kpt_experts_forward and kpt_experts_decode", c);
    const ExpertsInputs in(random, c);
    const double rounding = 1.01 * rounding_of(c.dtype);
    const int64_t hidden = c.hidden, width = c.width();
    std::vector<double> want(c.tokens * hidden, 0.0), bound(c.tokens * hidden, 0.0);
    std::vector<double> want_h(c.pairs() * width, 0.0), bound_h(c.pairs() * width, 0.0);
    for (int64_t r = 0; r < c.pairs(); r++) {
        const int64_t pair = in.sorted[r], t = pair / c.top_k, e = in.ids[pair];
        if (e < 0 || e >= c.experts) continue;
        double* h = want_h.data() + r * width;
        double* error = bound_h.data() + r * width;
        for (int64_t k = 0; k < hidden; k++) {
            for (int64_t n = 0; n < width; n++) {
                const double product = in.x.values[t * hidden + k] * in.up.value(e, k, n);
                h[n] += product;
                error[n] += std::fabs(product) * sum_error(hidden);
            }
        }
        std::vector<double> y(hidden, 0.0), error_y(hidden, 0.0);
        for (int64_t i = 0; i < c.intermediate; i++) {
            const int64_t at = c.gate(i), other = c.gated() ? c.up(i) : at;
            const double gate = h[at] + (c.up_bias ? in.up_bias.values[e * width + at] : 0.0);
            const double up = h[other] + (c.up_bias ? in.up_bias.values[e * width + other] : 0.0);
            const Activated a = activate(in.act, gate, up);
            const double error_a = std::fabs(a.by_gate) * error[at] + std::fabs(a.by_up) * error[other] +
                                   8.0 * error[at] * error[other] + error_of(gate) * (2.0 + std::fabs(up)) +
                                   rounding * std::fabs(a.value);
            for (int64_t n = 0; n < hidden; n++) {
                const double down = in.down.value(e, i, n);
                y[n] += a.value * down;
                error_y[n] += (error_a + sum_error(c.intermediate) * std::fabs(a.value)) * std::fabs(down);
            }
        }
        const double weight = in.weights.values[pair];
        for (int64_t n = 0; n < hidden; n++) {
            const double value = y[n] + (c.down_bias ? in.down_bias.values[e * hidden + n] : 0.0);
            want[t * hidden + n] += weight * value;
            bound[t * hidden + n] += std::fabs(weight) * (error_y[n] + (rounding + 0x1p-20) * std::fabs(value));
        }
        for (int64_t n = 0; n < width; n++) error[n] += rounding * std::fabs(h[n]) + 0x1p-25;
    }
    for (size_t i = 0; i < want.size(); i++) bound[i] += rounding * std::fabs(want[i]) + 0x1p-23;

    Rows out[2], h[2], decoded[2];
    for (int turn = 0; turn < 2; turn++) {
        out[turn] = Rows(c.dtype, c.tokens, hidden, c.gaps ? 7 : 0);
        h[turn] = Rows(c.dtype, c.pairs(), width, c.gaps ? 1 : 0);
        decoded[turn] = Rows(c.dtype, c.tokens, hidden, c.gaps ? 7 : 0);
        const kpt_experts forward = in.arguments(c, out[turn].view(), h[turn].view_or_null(keep_h), true);
        CHECK(kernels.experts_forward(&forward) == KPT_OK, "forward returned an error");
        const kpt_experts decode = in.arguments(c, decoded[turn].view(), kpt_rows{nullptr, 0, 0}, false);
        CHECK(kernels.experts_decode(&decode) == KPT_OK, "decode returned an error");
    }
    if (keep_h) compare("forward's h", h[0].read("forward's h"), want_h, bound_h);
    compare("forward's out", out[0].read("forward's out"), want, bound);
    compare("decode's out", decoded[0].read("decode's out"), want, bound);
    if (keep_h) compare_bits("forward's h", h[0].memory, h[1].memory);
    compare_bits("forward's out", out[0].memory, out[1].memory);
    compare_bits("decode's out", decoded[0].memory, decoded[1].memory);
}

}  // namespace

void test_experts_forward() {
    Random random(4);
    for (int dtype : experts_dtypes) {
        for (int act = KPT_SWIGLU; act <= KPT_RELU2; act++) {
            for (int i = 0; i < 9; i++)
                check_forward(random, draw_experts_case(random, dtype, act, i == 0 ? 6e6 : 8e5), random.coin());
        }
    }
    for (int i = 0; i < 2; i++) check_forward(random, draw_groups_case(random), i == 0);
    for (int i = 0; i < 3; i++) check_forward(random, draw_turned_case(random), i == 0);
    for (int dtype : {KPT_FLOAT32, KPT_BFLOAT16}) {
        for (int i = 0; i < 3; i++) check_forward(random, draw_wide_case(random, dtype, false), false);
        check_forward(random, draw_wide_case(random, dtype, true), false);
    }
}

}  // namespace test
