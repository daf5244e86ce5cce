#include <algorithm>
#include <cmath>

#include "tensors.h"

namespace test {

namespace {

constexpr int floats[] = {KPT_FLOAT32, KPT_BFLOAT16, KPT_FLOAT16};
constexpr int small[] = {KPT_FLOAT8_E4M3FN, KPT_FLOAT8_E5M2};
constexpr int64_t some_rows[] = {0, 1, 2, 3, 5, 7, 16, 17, 25, 40, 63, 130, 260, 300};
constexpr int64_t some_inner[] = {1,  2,   3,   7,   8,   15,  17,  31,  33,  63,  64, 65,
                                  96, 127, 128, 129, 130, 200, 255, 257, 300, 513, 600};
constexpr int64_t some_columns[] = {1,  2,  3,  4,  5,   15,  16,  17,  31,  32,  33,
                                    48, 63, 65, 96, 127, 129, 131, 200, 256, 257, 300};
constexpr int64_t some_experts[] = {1, 1, 2, 3, 5, 16};

struct Case {
    int x_dtype, weight_dtype, out_dtype, scales_of, x_scale;  // 0 none, 1 of rows, 2 of blocks
    bool n_contiguous;
    int64_t rows, inner, columns, experts;
    int load, threads;
    bool gaps;
};

// End rows: evenly at random, all rows one expert's, none anyone's, a few, or nearly all one expert's and one each of others.
std::vector<int32_t> random_offsets(Random& random, int64_t rows, int64_t experts, int load) {
    std::vector<int32_t> ends;
    const int64_t owner = random.below(experts);
    int64_t end = 0;
    for (int64_t e = 0; e < experts; e++) {
        if (load == 1) end = e >= owner ? rows : 0;
        else if (load == 2) end = 0;
        else if (load == 3) end = std::min(rows, end + random.below(3));
        else if (load == 4) end = std::min(rows, end + (e == owner ? std::max<int64_t>(rows - experts, 1) : 1));
        else end = std::min(rows, end + random.below(2 * rows / experts + 2));
        ends.push_back(static_cast<int32_t>(end));
    }
    if (load == 0 && random.coin()) ends.back() = static_cast<int32_t>(rows);
    return ends;
}

double x_scale_of(const std::vector<float>& scales, int kind, int64_t row, int64_t k, int64_t blocks) {
    if (kind == 0) return 1.0;
    return static_cast<double>(kind == 1 ? scales[row] : scales[row * blocks + k / 128]);
}

void check_grouped_mm(Random& random, const Case& c) {
    static const char* const scale_names[] = {"no scales", "scales of N", "scales of K", "scales of blocks"};
    static const char* const x_scale_names[] = {"x without scales", "x with scales of rows", "x with scales of blocks"};
    const bool scales_sums = random.coin();
    const int bias_dtype = random.coin() ? floats[random.below(3)] : -1;
    begin_case(
        "kpt_grouped_mm of x %s [%lld, %lld] and weights %s [%lld, %lld, %lld] with %s contiguous, %s, %s, out %s, "
        "load %d, "
        "gaps %d, %d threads, scaled sums %d, bias %s",
        name_of(c.x_dtype), static_cast<long long>(c.rows), static_cast<long long>(c.inner), name_of(c.weight_dtype),
        static_cast<long long>(c.experts), static_cast<long long>(c.inner), static_cast<long long>(c.columns),
        c.n_contiguous ? "N" : "K", scale_names[c.scales_of], x_scale_names[c.x_scale], name_of(c.out_dtype), c.load,
        c.gaps, c.threads, scales_sums, bias_dtype < 0 ? "none" : name_of(bias_dtype));
    Rows x = Rows::random(random, c.x_dtype, c.rows, c.inner, c.gaps ? 5 : 0, 1.0);
    Rows bias = Rows::random(random, bias_dtype < 0 ? KPT_FLOAT32 : bias_dtype, c.experts, c.columns, c.gaps ? 3 : 0, 1.0);
    std::vector<float> of_sums;
    for (int64_t i = 0; i < c.rows; i++) of_sums.push_back(static_cast<float>(random.between(0.5, 1.5)));
    Array<float> row_scale(of_sums);
    Matrices weight = Matrices::random(
        random, c.weight_dtype, c.experts, c.inner, c.columns, c.n_contiguous, c.gaps ? 3 : 0, c.scales_of, 1.0);
    const std::vector<int32_t> ends = random_offsets(random, c.rows, c.experts, c.load);
    const int64_t blocks = c.x_scale == 0 ? 0 : c.x_scale == 1 ? 1 : (c.inner + 127) / 128;
    std::vector<float> scales;
    for (int64_t i = 0; i < c.rows * blocks; i++) scales.push_back(static_cast<float>(random.between(0.5, 1.5)));
    Array<int32_t> offsets(ends);
    Array<float> x_scale(scales);
    for (Memory* memory : {&x.memory, &weight.memory, &bias.memory}) memory->freeze();
    offsets.freeze();
    x_scale.freeze();
    row_scale.freeze();

    std::vector<double> want(c.rows * c.columns, 0.0), tolerance(c.rows * c.columns, 0.0);
    int64_t row = 0;
    for (int64_t e = 0; e < c.experts; e++) {
        for (; row < ends[e]; row++) {
            std::vector<double> sum(c.columns, 0.0), size(c.columns, 0.0);
            for (int64_t k = 0; k < c.inner; k++) {
                const double own = x.values[row * c.inner + k] * x_scale_of(scales, c.x_scale, row, k, blocks);
                for (int64_t n = 0; n < c.columns; n++) {
                    const double product = own * weight.value(e, k, n);
                    sum[n] += product;
                    size[n] += std::fabs(product);
                }
            }
            const double factor = scales_sums ? static_cast<double>(of_sums[row]) : 1.0;
            for (int64_t n = 0; n < c.columns; n++) {
                const double added = bias_dtype < 0 ? 0.0 : bias.values[e * c.columns + n];
                const double result = sum[n] * factor + added;
                want[row * c.columns + n] = result;
                tolerance[row * c.columns + n] = 1.01 * rounding_of(c.out_dtype) * std::fabs(result) +
                                                 0x1p-24 * ((c.inner + 16.0) * size[n] * factor + 2 * std::fabs(added)) +
                                                 0x1p-25;
            }
        }
    }
    Rows out[2];
    for (int turn = 0; turn < 2; turn++) {
        // The gap is the same, the address is not.
        out[turn] = Rows(c.out_dtype, c.rows, c.columns, c.gaps ? 7 : 0);
        const struct kpt_grouped_mm args{
            x.view(),  out[turn].view(), weight.view(), c.x_scale != 0 ? x_scale.data() : nullptr,
            blocks,    offsets.data(),   c.rows,        c.inner,
            c.columns, c.experts,        c.threads,     scales_sums ? row_scale.data() : nullptr,
            bias_dtype < 0 ? kpt_rows{} : bias.view()};
        CHECK(kernels.grouped_mm(&args) == KPT_OK, "it returned an error");
    }
    compare("out", out[0].read("out"), want, tolerance);
    compare_bits("out", out[0].memory, out[1].memory);
}

// Each of the 256 codes of a dtype of 8 bits in a column of its own, in products of few and of many rows: at all of K,
// or at `place` alone among zeros, where the result is exact.
void check_codes(int dtype, int64_t rows, int64_t inner, bool n_contiguous, int x_dtype, int64_t place, bool blocks) {
    begin_case(
        "kpt_grouped_mm of x %s [%lld, %lld] and all codes of %s, at %lld, with %s contiguous, %s", name_of(x_dtype),
        static_cast<long long>(rows), static_cast<long long>(inner), name_of(dtype), static_cast<long long>(place),
        n_contiguous ? "N" : "K", blocks ? "scales of blocks" : "no scales");
    Random random(9);
    Rows x(x_dtype, rows, inner, 0), out(KPT_FLOAT32, rows, 256, 0);
    const auto x_value = [](int64_t r, int64_t k) { return static_cast<double>(1 + (r + k) % 7); };
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t k = 0; k < inner; k++) x.set(r, k, x_value(r, k));
    }
    Matrices weight = Matrices::random(
        random, dtype, 1, inner, 256, n_contiguous, 0, blocks ? KPT_SCALES_BLOCK : KPT_SCALES_NONE, 1.0);
    const kpt_matrices m = weight.view();
    std::vector<double> want, tolerance;
    for (int64_t n = 0; n < 256; n++) {
        for (int64_t k = 0; k < inner; k++) {
            *weight.at(0, k, n) = place < 0 || k == place ? static_cast<uint8_t>(n) : uint8_t{0};
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t n = 0; n < 256; n++) {
            double sum = 0.0;
            for (int64_t k = place < 0 ? 0 : place; k < (place < 0 ? inner : place + 1); k++) {
                const float scale = blocks ? m.scale[k / 128 * m.stride_sk + n / 128 * m.stride_sn] : 1.0f;
                sum += x_value(r, k) * static_cast<double>(scale) * decode(dtype, weight.at(0, k, n));
            }
            want.push_back(sum);
            tolerance.push_back(std::fabs(sum) * 0x1p-21);
        }
    }
    Array<int32_t> offsets(std::vector<int32_t>{static_cast<int32_t>(rows)});
    const struct kpt_grouped_mm args{x.view(), out.view(), m, nullptr, 0, offsets.data(), rows, inner, 256, 1, 1, nullptr, {}};
    CHECK(kernels.grouped_mm(&args) == KPT_OK, "it returned an error");
    compare("out", out.read("out"), want, tolerance);
}

// NaN where nothing is read for a result must not come into it.
void check_others_nan(bool n_contiguous, int dtype, int64_t rows) {
    begin_case(
        "kpt_grouped_mm of %lld rows in %s beside rows and experts full of NaN, %s contiguous",
        static_cast<long long>(rows), name_of(dtype), n_contiguous ? "N" : "K");
    Random random(8);
    Rows x = Rows::random(random, dtype, rows + 2, 37, 3, 1.0), out(dtype, rows + 2, 19, 3);
    Matrices weight = Matrices::random(random, dtype, 3, 37, 19, n_contiguous, 3, KPT_SCALES_NONE, 1.0);
    for (int64_t k = 0; k < 37; k++) {
        x.set(rows, k, std::nan(""));
        x.set(rows + 1, k, INFINITY);
        for (int64_t n = 0; n < 19; n++) {
            encode(dtype, std::nan(""), weight.at(0, k, n));
            encode(dtype, INFINITY, weight.at(2, k, n));
        }
    }
    const int32_t all = static_cast<int32_t>(rows);
    Array<int32_t> offsets(std::vector<int32_t>{0, all, all});
    const struct kpt_grouped_mm args{x.view(), out.view(), weight.view(), nullptr, 0, offsets.data(), rows + 2, 37, 19,
                                     3,        2,          nullptr,       {}};
    CHECK(kernels.grouped_mm(&args) == KPT_OK, "it returned an error");
    const std::vector<double> got = out.read("out");
    for (int64_t i = 0; i < (rows + 2) * 19; i++) {
        CHECK(
            i < rows * 19 ? std::isfinite(got[i]) : got[i] == 0.0, "number %lld is %g", static_cast<long long>(i),
            got[i]);
    }
}

void check_wgrad(Random& random, const Case& c) {
    begin_case(
        "kpt_grouped_mm_wgrad of %s [%lld, %lld] and [%lld, %lld], %lld experts, load %d, gaps %d, %d threads",
        name_of(c.x_dtype), static_cast<long long>(c.rows), static_cast<long long>(c.inner),
        static_cast<long long>(c.rows), static_cast<long long>(c.columns), static_cast<long long>(c.experts), c.load,
        c.gaps, c.threads);
    Rows x = Rows::random(random, c.x_dtype, c.rows, c.inner, c.gaps ? 3 : 0, 1.0);
    Rows grad = Rows::random(random, c.x_dtype, c.rows, c.columns, c.gaps ? 5 : 0, 1.0);
    const std::vector<int32_t> ends = random_offsets(random, c.rows, c.experts, c.load);
    Array<int32_t> offsets(ends);
    for (Memory* memory : {&x.memory, &grad.memory}) memory->freeze();
    offsets.freeze();
    const int64_t size = c.inner * c.columns;
    std::vector<double> want(c.experts * size, 0.0), tolerance(c.experts * size, 0.0);
    int64_t row = 0;
    for (int64_t e = 0; e < c.experts; e++) {
        double* sum = want.data() + e * size;
        double* bound = tolerance.data() + e * size;
        const double rows = static_cast<double>(ends[e] - row);
        for (; row < ends[e]; row++) {
            for (int64_t k = 0; k < c.inner; k++) {
                for (int64_t n = 0; n < c.columns; n++) {
                    const double product = x.values[row * c.inner + k] * grad.values[row * c.columns + n];
                    sum[k * c.columns + n] += product;
                    bound[k * c.columns + n] += std::fabs(product) * 0x1p-24 * (rows + 16.0);
                }
            }
        }
        for (int64_t i = 0; i < size; i++) {
            if (rows > 0) bound[i] += 1.01 * rounding_of(c.x_dtype) * std::fabs(sum[i]) + 0x1p-25;
        }
    }
    Rows out[2];
    for (int turn = 0; turn < 2; turn++) {
        out[turn] = Rows(c.x_dtype, c.experts * c.inner, c.columns, 0);
        const struct kpt_grouped_mm_wgrad args{x.view(),       grad.view(), out[turn].memory.data(),
                                               offsets.data(), c.rows,      c.inner,
                                               c.columns,      c.experts,   c.threads};
        CHECK(kernels.grouped_mm_wgrad(&args) == KPT_OK, "it returned an error");
    }
    compare("out", out[0].read("out"), want, tolerance);
    compare_bits("out", out[0].memory, out[1].memory);
}

// Sizes at random whose product stays small.
void draw_sizes(Random& random, Case& c, double most) {
    do {
        c.rows = random.one_of(some_rows);
        c.inner = random.one_of(some_inner);
        c.columns = random.one_of(some_columns);
        c.experts = random.one_of(some_experts);
    } while (static_cast<double>(c.rows + 8) * c.inner * c.columns > most || c.experts * c.inner * c.columns > 600000);
    c.load = static_cast<int>(random.below(6));
    c.threads = random.coin() ? 3 : 1;
    c.gaps = random.coin();
}

}  // namespace

void test_grouped_mm() {
    Random random(2);
    const auto run = [&](int x, int weight, int scales, int x_scale, int times) {
        for (int i = 0; i < 2 * times; i++) {
            Case c{x, weight, x, scales, x_scale, i % 2 == 0, 0, 0, 0, 0, 0, 0, false};
            if (weight >= KPT_FLOAT8_E4M3FN) c.out_dtype = random.one_of(floats);
            draw_sizes(random, c, i < 2 ? 6e6 : 1e6);
            check_grouped_mm(random, c);
        }
    };
    for (int dtype : floats) {
        run(dtype, dtype, KPT_SCALES_NONE, 0, 24);
        for (int weight : small) {
            for (int scales : {KPT_SCALES_NONE, KPT_SCALES_N, KPT_SCALES_K, KPT_SCALES_BLOCK})
                run(dtype, weight, scales, 0, 6);
        }
        for (bool n_contiguous : {false, true}) {
            for (int64_t size : {0, 1}) {
                check_grouped_mm(random, {dtype, dtype, dtype, 0, 0, n_contiguous, 5, size, 9, 2, 0, 3, false});
                check_grouped_mm(random, {dtype, dtype, dtype, 0, 0, n_contiguous, size, 9, 7, 2, 0, 3, true});
                check_grouped_mm(random, {dtype, dtype, dtype, 0, 0, n_contiguous, 40, 65, size, 2, 0, 1, false});
            }
            // The largest blocks of rows and columns, twice.
            check_grouped_mm(random, {dtype, dtype, dtype, 0, 0, n_contiguous, 512, 65, 512, 1, 1, 1, false});
            // Few rows on average, and many of one expert, whose results are then made of a part of a thread's columns.
            check_grouped_mm(random, {dtype, dtype, dtype, 0, 0, n_contiguous, 130, 65, 300, 16, 4, 1, true});
            for (int64_t rows : {3, 50}) check_others_nan(n_contiguous, dtype, rows);
        }
    }
    for (int x : small) {
        for (int weight : small) {
            for (int scales : {KPT_SCALES_NONE, KPT_SCALES_N, KPT_SCALES_K, KPT_SCALES_BLOCK}) {
                for (int x_scale : {0, 1, 2}) run(x, weight, scales, x_scale, 3);
            }
        }
    }
    // Long lines, by some panels of rows: ends inside of these, of a part of the lines, and of a block of scales.
    for (int64_t rows : {33, 48, 64, 65, 97, 128, 129}) {
        for (int weight : {KPT_BFLOAT16, KPT_FLOAT8_E4M3FN, KPT_FLOAT8_E5M2}) {
            for (int scales : {KPT_SCALES_NONE, KPT_SCALES_N, KPT_SCALES_BLOCK}) {
                if (weight == KPT_BFLOAT16 && scales != KPT_SCALES_NONE) continue;
                const int64_t inner = random.coin() ? 1024 : 1024 + random.below(600), columns = 1 + random.below(200);
                const int out = weight == KPT_BFLOAT16 || random.coin() ? KPT_BFLOAT16 : KPT_FLOAT32;
                check_grouped_mm(random, {KPT_BFLOAT16, weight, out, scales, 0, false, rows, inner, columns, 1, 1, random.coin() ? 3 : 1, random.coin()});
            }
        }
    }
    for (int dtype : small) {
        for (int64_t rows : {1, 3, 30}) {
            for (int64_t inner : {1, 64, 200}) {
                for (bool n_contiguous : {false, true}) {
                    for (int x_dtype : floats) check_codes(dtype, rows, inner, n_contiguous, x_dtype, -1, false);
                }
            }
            // At the end of vectors and of what is read at once, inside of them, and in what is left of each.
            for (int64_t inner : {77, 128, 200}) {
                for (int64_t place : {0, 7, 16, 31, 32, 63, 64, 70, 76, 127, 128, 191, 192, 199}) {
                    if (place >= inner) continue;
                    check_codes(dtype, rows, inner, false, KPT_FLOAT32, place, false);
                    check_codes(dtype, rows, inner, false, KPT_BFLOAT16, place, true);
                }
            }
        }
    }
}

void test_grouped_mm_wgrad() {
    Random random(3);
    for (int dtype : floats) {
        for (int i = 0; i < 40; i++) {
            Case c{dtype, dtype, dtype, 0, 0, true, 0, 0, 0, 0, 0, 0, false};
            draw_sizes(random, c, i < 4 ? 6e6 : 1e6);
            check_wgrad(random, c);
        }
    }
}

}  // namespace test
