// The gradients of moe.experts against double loops.
// Beside each number goes a bound of its error, which follows from the rounding of the dtype at those places where
// kernels may round (and of float32 sums), through first derivatives.
#include "experts_case.h"

namespace test {

namespace {

// Sums and the bounds of their errors.
struct Sums {
    std::vector<double> values, errors;
    explicit Sums(int64_t count) : values(count, 0.0), errors(count, 0.0) {}
    void add(int64_t i, double value, double error) {
        values[i] += value;
        errors[i] += error;
    }
    void check(const char* what, const std::vector<double>& got, double rounding) {
        for (size_t i = 0; i < values.size(); i++) errors[i] += rounding * std::fabs(values[i]) + 0x1p-23;
        compare(what, got, values, errors);
    }
};

void check_backward(Random& random, const ExpertsCase& c, unsigned wanted) {
    begin_experts("kpt_experts_backward", c);
    const ExpertsInputs in(random, c);
    const double rounding = 1.01 * rounding_of(c.dtype);
    const int64_t hidden = c.hidden, width = c.width(), intermediate = c.intermediate, taken = in.ends.back();
    const bool frozen = size_of(c.weight_dtype) == 1;
    const auto wants = [&](unsigned bit) { return (wanted >> bit & 1) != 0; };
    const bool want_up = wants(2) && !frozen, want_down = wants(3) && !frozen;
    const bool want_up_bias = wants(4) && c.up_bias, want_down_bias = wants(5) && c.down_bias;
    Rows grad = Rows::random(random, c.dtype, c.tokens, hidden, c.gaps ? 5 : 0, 1.0);
    // What belongs to no expert stays NaN.
    Rows h(c.dtype, c.pairs(), width, c.gaps ? 3 : 0);
    for (int64_t r = 0; r < taken; r++) {
        for (int64_t n = 0; n < width; n++) h.set(r, n, random.between(-2.0, 2.0));
    }
    grad.memory.freeze();
    h.memory.freeze();
    Sums grad_x(c.tokens * hidden), grad_weights(c.pairs()), grad_up(c.experts * hidden * width);
    Sums grad_down(c.experts * intermediate * hidden), grad_up_bias(c.experts * width),
        grad_down_bias(c.experts * hidden);
    for (int64_t r = 0; r < taken; r++) {
        const int64_t pair = in.sorted[r], t = pair / c.top_k, e = in.ids[pair];
        const double weight = in.weights.values[pair], sum = sum_error(taken);
        const double* own = grad.values.data() + t * hidden;
        std::vector<double> of_h(width, 0.0), error_h(width, 0.0);
        for (int64_t i = 0; i < intermediate; i++) {
            double of_a = 0.0, error = 0.0;
            for (int64_t n = 0; n < hidden; n++) {
                of_a += own[n] * in.down.value(e, i, n);
                error += std::fabs(own[n] * in.down.value(e, i, n)) * sum_error(hidden);
            }
            const int64_t at = c.gate(i), other = c.gated() ? c.up(i) : at;
            const auto with_bias = [&](int64_t n) {
                const double value = h.values[r * width + n];
                // In float32, as the side of a limit on which it lies.
                return c.up_bias ? static_cast<double>(static_cast<float>(value + in.up_bias.values[e * width + n]))
                                 : value;
            };
            const double gate = with_bias(at), up = with_bias(other);
            const Activated a = activate(in.act, gate, up);
            const double error_a = error_of(gate) * (2.0 + std::fabs(up));
            grad_weights.add(
                pair, of_a * a.value,
                std::fabs(a.value) * error +
                    std::fabs(of_a) * (error_a + std::fabs(a.value) * sum_error(intermediate)));
            for (int64_t n = 0; n < hidden; n++) {
                const double value = weight * a.value * own[n];
                grad_down.add(
                    (e * intermediate + i) * hidden + n, value,
                    std::fabs(value) * (rounding + sum) + std::fabs(weight * own[n]) * error_a);
            }
            of_h[at] = weight * of_a * a.by_gate;
            error_h[at] = std::fabs(weight) * (error * std::fabs(a.by_gate) + std::fabs(of_a) * error_a) +
                          rounding * std::fabs(of_h[at]);
            if (c.gated()) {
                of_h[other] = weight * of_a * a.by_up;
                error_h[other] = std::fabs(weight) * (error * std::fabs(a.by_up) + std::fabs(of_a) * error_a) +
                                 rounding * std::fabs(of_h[other]);
            }
        }
        for (int64_t n = 0; n < hidden; n++) {
            const double value = weight * own[n];
            grad_down_bias.add(e * hidden + n, value, std::fabs(value) * (sum + 0x1p-22));
            if (!c.down_bias) continue;
            const double part = own[n] * in.down_bias.values[e * hidden + n];
            grad_weights.add(pair, part, std::fabs(part) * sum_error(hidden));
        }
        for (int64_t n = 0; n < width; n++)
            grad_up_bias.add(e * width + n, of_h[n], error_h[n] + std::fabs(of_h[n]) * sum);
        for (int64_t k = 0; k < hidden; k++) {
            double value = 0.0, error = 0.0;
            const double x = in.x.values[t * hidden + k];
            for (int64_t n = 0; n < width; n++) {
                const double weight_up = in.up.value(e, k, n);
                value += of_h[n] * weight_up;
                error += std::fabs(weight_up) * (error_h[n] + std::fabs(of_h[n]) * sum_error(width));
                grad_up.add(
                    (e * hidden + k) * width + n, x * of_h[n], std::fabs(x) * (error_h[n] + std::fabs(of_h[n]) * sum));
            }
            grad_x.add(t * hidden + k, value, error + (rounding + 0x1p-20) * std::fabs(value));
        }
    }
    Rows x_out[2], weights_out[2], up_bias_out[2], down_bias_out[2];
    Matrices up_out[2], down_out[2];
    const int64_t gap = c.gaps ? 1 : 0;
    for (int turn = 0; turn < 2; turn++) {
        x_out[turn] = Rows(c.dtype, c.tokens, hidden, gap);
        weights_out[turn] = Rows(c.weights_dtype, c.tokens, c.top_k, 0);
        up_bias_out[turn] = Rows(c.dtype, c.experts, width, gap);
        down_bias_out[turn] = Rows(c.dtype, c.experts, hidden, gap);
        up_out[turn] = Matrices(c.dtype, c.experts, hidden, width, c.n_contiguous, gap);
        down_out[turn] = Matrices(c.dtype, c.experts, intermediate, hidden, c.n_contiguous, gap);
        const struct kpt_experts_backward args{
            in.arguments(c, kpt_rows{nullptr, 0, 0}, h.view(), true),
            grad.view(),
            x_out[turn].view_or_null(wants(0)),
            weights_out[turn].view_or_null(wants(1)),
            up_out[turn].view_or_null(want_up),
            down_out[turn].view_or_null(want_down),
            up_bias_out[turn].view_or_null(want_up_bias),
            down_bias_out[turn].view_or_null(want_down_bias)};
        CHECK(kernels.experts_backward(&args) == KPT_OK, "it returned an error");
    }
    if (wants(0)) grad_x.check("grad_x", x_out[0].read("grad_x"), rounding);
    if (wants(1))
        grad_weights.check("grad_weights", weights_out[0].read("grad_weights"), 1.01 * rounding_of(c.weights_dtype));
    if (want_up) grad_up.check("grad_up", up_out[0].read("grad_up"), rounding);
    if (want_down) grad_down.check("grad_down", down_out[0].read("grad_down"), rounding);
    if (want_up_bias) grad_up_bias.check("grad_up_bias", up_bias_out[0].read("grad_up_bias"), rounding);
    if (want_down_bias) grad_down_bias.check("grad_down_bias", down_bias_out[0].read("grad_down_bias"), rounding);
    compare_bits("grad_x", x_out[0].memory, x_out[1].memory);
    compare_bits("grad_weights", weights_out[0].memory, weights_out[1].memory);
    compare_bits("grad_up", up_out[0].memory, up_out[1].memory);
    compare_bits("grad_down", down_out[0].memory, down_out[1].memory);
    compare_bits("grad_up_bias", up_bias_out[0].memory, up_bias_out[1].memory);
    compare_bits("grad_down_bias", down_bias_out[0].memory, down_bias_out[1].memory);
}

}  // namespace

void test_experts_backward() {
    Random random(5);
    for (int dtype : experts_dtypes) {
        for (int act = KPT_SWIGLU; act <= KPT_RELU2; act++) {
            for (int i = 0; i < 6; i++) {
                const unsigned wanted = i < 3 ? 63 : static_cast<unsigned>(random.below(64));
                check_backward(random, draw_experts_case(random, dtype, act, i == 0 ? 3e6 : 6e5), wanted);
            }
        }
    }
    for (int i = 0; i < 3; i++) {
        check_backward(random, draw_groups_case(random), i == 0 ? 63 : static_cast<unsigned>(random.below(64)));
    }
}

}  // namespace test
