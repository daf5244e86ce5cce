#include <algorithm>
#include <cmath>

#include "tensors.h"

namespace test {

namespace {

constexpr const char* score_names[] = {"softmax", "softmax_after", "sigmoid"};

struct Case {
    int dtype, score;
    bool renormalize, bias;
    int64_t tokens, experts, top_k, groups, top_groups;
    double scale;
    int threads;
    int64_t gap;
};

void begin(const char* kernel, const Case& c) {
    begin_case(
        "%s of %s logits [%lld, %lld], %s, top_k %lld, %lld of %lld groups, renormalize %d, bias %d, scale %g, gap "
        "%lld, %d "
        "threads",
        kernel, name_of(c.dtype), static_cast<long long>(c.tokens), static_cast<long long>(c.experts),
        score_names[c.score], static_cast<long long>(c.top_k), static_cast<long long>(c.top_groups),
        static_cast<long long>(c.groups), c.renormalize, c.bias, c.scale, static_cast<long long>(c.gap), c.threads);
}

std::vector<double> scores_of(const Case& c, const double* logits) {
    std::vector<double> out(logits, logits + c.experts);
    if (c.score == KPT_SIGMOID) {
        for (double& x : out) x = 1.0 / (1.0 + std::exp(-x));
    } else if (c.score == KPT_SOFTMAX) {
        const double most = *std::max_element(out.begin(), out.end());
        double sum = 0.0;
        for (double& x : out) sum += x = std::exp(x - most);
        for (double& x : out) x /= sum;
    }
    return out;
}

// The places of the `count` largest, best first, the lower place first of equal ones; `margin` becomes at most the
// smallest distance that decided.
std::vector<int64_t> largest(const std::vector<double>& keys, int64_t count, double& margin) {
    std::vector<int64_t> places;
    for (size_t i = 0; i < keys.size(); i++) {
        if (keys[i] > -INFINITY) places.push_back(static_cast<int64_t>(i));
    }
    std::stable_sort(places.begin(), places.end(), [&](int64_t a, int64_t b) { return keys[a] > keys[b]; });
    for (int64_t i = 0; i < count && i + 1 < static_cast<int64_t>(places.size()); i++) {
        margin = std::min(margin, keys[places[i]] - keys[places[i + 1]]);
    }
    places.resize(count);
    return places;
}

std::vector<int64_t> choose(const Case& c, std::vector<double> keys, const std::vector<float>& bias, double& margin) {
    for (int64_t e = 0; c.bias && e < c.experts; e++) keys[e] += static_cast<double>(bias[e]);
    if (c.groups > c.top_groups) {
        const int64_t size = c.experts / c.groups;
        std::vector<double> of_groups;
        for (int64_t g = 0; g < c.groups; g++) {
            std::vector<double> own(keys.begin() + g * size, keys.begin() + (g + 1) * size);
            std::sort(own.rbegin(), own.rend());
            of_groups.push_back(own[0] + (c.bias && size > 1 ? own[1] : 0.0));
        }
        std::vector<bool> kept(c.groups, false);
        // Which of the kept groups is better decides nothing.
        double unused = INFINITY;
        const std::vector<int64_t> best = largest(of_groups, c.top_groups, unused);
        double worst_kept = INFINITY, best_left = -INFINITY;
        for (int64_t g : best) kept[g] = true;
        for (int64_t g = 0; g < c.groups; g++) {
            if (kept[g]) worst_kept = std::min(worst_kept, of_groups[g]);
            else best_left = std::max(best_left, of_groups[g]);
        }
        margin = std::min(margin, worst_kept - best_left);
        for (int64_t e = 0; e < c.experts; e++) {
            if (!kept[e / size]) keys[e] = -INFINITY;
        }
    }
    return largest(keys, c.top_k, margin);
}

std::vector<double> weigh(const Case& c, const double* logits, const std::vector<int64_t>& chosen) {
    const std::vector<double> scores = scores_of(c, logits);
    std::vector<double> out;
    double sum = 1e-20;
    for (int64_t e : chosen) out.push_back(scores[e]);
    if (c.score == KPT_SOFTMAX_AFTER) {
        const double most = *std::max_element(out.begin(), out.end());
        double all = 0.0;
        for (double& x : out) all += x = std::exp(x - most);
        for (double& x : out) x /= all;
    }
    for (double x : out) sum += x;
    for (double& x : out) x = x / (c.renormalize ? sum : 1.0) * c.scale;
    return out;
}

// Logits and biases for which float32 chooses as float64 does: no decision is close.
void draw_token(Random& random, const Case& c, Rows& logits, int64_t token, const std::vector<float>& bias) {
    for (int turn = 0; turn < 400; turn++) {
        for (int64_t e = 0; e < c.experts; e++) logits.set(token, e, random.between(-4.0, 4.0));
        const double* own = logits.values.data() + token * c.experts;
        double margin = INFINITY;
        choose(c, scores_of(c, own), bias, margin);
        if (margin > 2e-6) return;
    }
    fail("the test found no logits that are far enough from each other");
}

std::vector<float> draw_bias(Random& random, const Case& c) {
    std::vector<float> bias;
    for (int64_t e = 0; c.bias && e < c.experts; e++) bias.push_back(static_cast<float>(random.between(-1.0, 1.0)));
    return bias;
}

void check_gating(Random& random, const Case& c) {
    begin("kpt_top_k_gating", c);
    const std::vector<float> bias_values = draw_bias(random, c);
    Rows logits(c.dtype, c.tokens, c.experts, c.gap);
    for (int64_t t = 0; t < c.tokens; t++) draw_token(random, c, logits, t, bias_values);
    Array<float> bias(bias_values);
    logits.memory.freeze();
    bias.freeze();
    std::vector<double> want, tolerance;
    std::vector<int64_t> want_index;
    for (int64_t t = 0; t < c.tokens; t++) {
        double margin = INFINITY;
        const double* own = logits.values.data() + t * c.experts;
        const std::vector<int64_t> chosen = choose(c, scores_of(c, own), bias_values, margin);
        want_index.insert(want_index.end(), chosen.begin(), chosen.end());
        for (double weight : weigh(c, own, chosen)) {
            want.push_back(weight);
            tolerance.push_back(4e-6 * std::fabs(weight) + 1e-9);
        }
    }
    std::vector<float> first;
    for (int turn = 0; turn < 2; turn++) {
        Array<float> weights(c.tokens * c.top_k);
        Array<int64_t> index(c.tokens * c.top_k);
        const struct kpt_top_k_gating args{logits.view(),  c.bias ? bias.data() : nullptr,
                                           weights.data(), index.data(),
                                           c.tokens,       c.experts,
                                           c.top_k,        c.groups,
                                           c.top_groups,   c.score,
                                           c.renormalize,  static_cast<float>(c.scale),
                                           c.threads};
        CHECK(kernels.top_k_gating(&args) == KPT_OK, "it returned an error");
        CHECK(index.values() == want_index, "other experts were chosen");
        const std::vector<float> got = weights.values();
        if (turn == 1) CHECK(got == first, "a second call gave other weights");
        first = got;
    }
    compare("weights", std::vector<double>(first.begin(), first.end()), want, tolerance);
}

// Equal, infinite and NaN logits: the choice is of different experts that exist, equal ones in their order.
void check_odd_logits(int dtype, int64_t experts, int64_t top_k, int kind) {
    begin_case(
        "kpt_top_k_gating of odd %s logits (kind %d), %lld experts, top_k %lld", name_of(dtype), kind,
        static_cast<long long>(experts), static_cast<long long>(top_k));
    const double odd[] = {0.25, INFINITY, -INFINITY, std::nan("")};
    for (int score : {KPT_SOFTMAX, KPT_SOFTMAX_AFTER, KPT_SIGMOID}) {
        for (bool with_bias : {false, true}) {
            Rows logits(dtype, 2, experts, 1);
            for (int64_t e = 0; e < experts; e++) {
                logits.set(0, e, odd[kind]);
                logits.set(1, e, e % 3 == 0 ? odd[kind] : 0.5);
            }
            Array<float> bias(std::vector<float>(experts, 0.0f)), weights(2 * top_k);
            Array<int64_t> index(2 * top_k);
            const struct kpt_top_k_gating args{
                logits.view(),
                with_bias ? bias.data() : nullptr,
                weights.data(),
                index.data(),
                2,
                experts,
                top_k,
                1,
                1,
                score,
                1,
                1.0f,
                2};
            CHECK(kernels.top_k_gating(&args) == KPT_OK, "it returned an error");
            const std::vector<int64_t> chosen = index.values();
            std::vector<bool> seen(2 * experts, false);
            for (int64_t i = 0; i < 2 * top_k; i++) {
                CHECK(
                    chosen[i] >= 0 && chosen[i] < experts, "expert %lld was chosen", static_cast<long long>(chosen[i]));
                const int64_t place = i / top_k * experts + chosen[i];
                CHECK(!seen[place], "expert %lld was chosen twice", static_cast<long long>(chosen[i]));
                seen[place] = true;
                if (i < top_k)
                    CHECK(
                        chosen[i] == i, "equal logits: expert %lld came in place %lld",
                        static_cast<long long>(chosen[i]), static_cast<long long>(i));
            }
        }
    }
}

void check_gating_backward(Random& random, const Case& c) {
    begin("kpt_top_k_gating_backward", c);
    const std::vector<float> bias_values = draw_bias(random, c);
    Rows logits(c.dtype, c.tokens, c.experts, c.gap);
    std::vector<int64_t> index_values;
    std::vector<float> weight_values, grad_values;
    std::vector<double> want, tolerance;
    for (int64_t t = 0; t < c.tokens; t++) {
        draw_token(random, c, logits, t, bias_values);
        const double* own = logits.values.data() + t * c.experts;
        double margin = INFINITY;
        const std::vector<int64_t> chosen = choose(c, scores_of(c, own), bias_values, margin);
        index_values.insert(index_values.end(), chosen.begin(), chosen.end());
        std::vector<double> grad;
        for (double weight : weigh(c, own, chosen)) {
            weight_values.push_back(static_cast<float>(weight));
            grad_values.push_back(static_cast<float>(random.between(-1.0, 1.0)));
            grad.push_back(static_cast<double>(grad_values.back()));
        }
        // d weights[j] / d logits[e], by differences of fourth order in float64, which knows no formula.
        std::vector<double> sums(c.experts, 0.0);
        std::vector<double> moved(own, own + c.experts);
        const double step = 1e-3;
        for (int64_t e = 0; e < c.experts; e++) {
            const double factors[] = {1.0, -8.0, 8.0, -1.0}, places[] = {-2.0, -1.0, 1.0, 2.0};
            for (int i = 0; i < 4; i++) {
                moved[e] = own[e] + places[i] * step;
                const std::vector<double> weights = weigh(c, moved.data(), chosen);
                for (int64_t j = 0; j < c.top_k; j++) sums[e] += factors[i] * weights[j] * grad[j] / (12.0 * step);
            }
            moved[e] = own[e];
        }
        for (double sum : sums) {
            want.push_back(sum);
            tolerance.push_back(1.01 * rounding_of(c.dtype) * std::fabs(sum) + 3e-6 * c.scale + 0x1p-25);
        }
    }
    Array<float> bias(bias_values), weights(weight_values), grad(grad_values);
    Array<int64_t> index(index_values);
    logits.memory.freeze();
    for (Array<float>* array : {&bias, &weights, &grad}) array->freeze();
    index.freeze();
    Rows out[2];
    for (Rows& each : out) {
        each = Rows(c.dtype, c.tokens, c.experts, c.gap);
        const struct kpt_top_k_gating_backward args{
            {logits.view(), c.bias ? bias.data() : nullptr, weights.data(), index.data(), c.tokens, c.experts, c.top_k,
             c.groups, c.top_groups, c.score, c.renormalize, static_cast<float>(c.scale), c.threads},
            grad.data(),
            each.view()};
        CHECK(kernels.top_k_gating_backward(&args) == KPT_OK, "it returned an error");
    }
    compare("grad_logits", out[0].read("grad_logits"), want, tolerance);
    compare_bits("grad_logits", out[0].memory, out[1].memory);
}

Case draw_case(Random& random, int dtype, int score, const int64_t* experts, int64_t kinds) {
    Case c{dtype, score, random.coin(), random.coin(), 0, experts[random.below(kinds)], 0, 1, 1, 1.0, 1, 0};
    c.tokens = random.below(9);
    // Of a dtype with few numbers there are not so many different ones.
    if (dtype == KPT_BFLOAT16) c.experts = std::min<int64_t>(c.experts, 12);
    if (dtype == KPT_FLOAT16) c.experts = std::min<int64_t>(c.experts, 40);
    const int64_t most = random.below(3) == 0 ? c.experts : std::min<int64_t>(c.experts, 8);
    c.top_k = 1 + random.below(most);
    if (random.coin()) {
        for (int64_t groups : {8, 4, 3, 2}) {
            if (c.experts % groups == 0 && c.groups == 1) c.groups = groups;
        }
        c.top_groups = 1 + random.below(c.groups);
        c.top_k = std::min(c.top_k, c.experts / c.groups * c.top_groups);
    }
    if (random.coin()) c.scale = 2.5;
    c.threads = random.coin() ? 3 : 1;
    c.gap = random.coin() ? 3 : 0;
    return c;
}

}  // namespace

void test_top_k_gating() {
    Random random(6);
    constexpr int64_t experts[] = {1,  2,  3,  4,  7,  8,  15, 16,  17,  24,  31,
                                   32, 33, 60, 63, 64, 65, 96, 128, 130, 200, 256};
    for (int dtype : {KPT_FLOAT32, KPT_BFLOAT16, KPT_FLOAT16}) {
        for (int score : {KPT_SOFTMAX, KPT_SOFTMAX_AFTER, KPT_SIGMOID}) {
            for (int i = 0; i < 60; i++) check_gating(random, draw_case(random, dtype, score, experts, 22));
        }
        for (int64_t count : {1, 5, 16, 64, 70, 130}) {
            for (int64_t top_k : {int64_t{1}, std::min<int64_t>(count, 8), count}) {
                for (int kind = 0; kind < 4; kind++) check_odd_logits(dtype, count, top_k, kind);
            }
        }
    }
    // So many that several threads take part.
    check_gating(random, {KPT_FLOAT32, KPT_SIGMOID, true, true, 700, 64, 6, 8, 4, 2.5, 3, 0});
    check_gating(random, {KPT_BFLOAT16, KPT_SOFTMAX, true, false, 5000, 8, 2, 1, 1, 1.0, 3, 5});
    // More blocks of 64 than bits in a word.
    check_gating(random, {KPT_FLOAT32, KPT_SOFTMAX_AFTER, true, false, 1, 5000, 4, 1, 1, 1.0, 1, 0});
}

void test_top_k_gating_backward() {
    Random random(7);
    constexpr int64_t experts[] = {1, 2, 3, 8, 15, 16, 17, 33, 64, 70};
    for (int dtype : {KPT_FLOAT32, KPT_BFLOAT16, KPT_FLOAT16}) {
        for (int score : {KPT_SOFTMAX, KPT_SOFTMAX_AFTER, KPT_SIGMOID}) {
            for (int i = 0; i < 24; i++) check_gating_backward(random, draw_case(random, dtype, score, experts, 10));
        }
    }
    check_gating_backward(random, {KPT_FLOAT32, KPT_SIGMOID, true, true, 2500, 16, 2, 1, 1, 1.0, 3, 0});
}

}  // namespace test
