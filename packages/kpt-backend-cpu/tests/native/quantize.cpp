#include <algorithm>
#include <cmath>
#include <cstring>

#include "tensors.h"

namespace test {

namespace {

struct Case {
    int dtype, format, rounding;
    int64_t matrices, matrix_rows, columns, block_rows, block_columns, gap;
    bool given;
    int threads;
};

// The numbers of a format from 0 to its largest, by code.
std::vector<float> numbers_of(int format) {
    const int mantissa = format == KPT_FLOAT8_E4M3FN ? 3 : 2, bias = format == KPT_FLOAT8_E4M3FN ? 7 : 15;
    const int last = format == KPT_FLOAT8_E4M3FN ? 0x7e : 0x7b;
    std::vector<float> numbers;
    for (int code = 0; code <= last; code++) {
        const int exponent = code >> mantissa, rest = code & ((1 << mantissa) - 1);
        const double value = exponent == 0 ? rest : rest + (1 << mantissa);
        numbers.push_back(static_cast<float>(std::ldexp(value, std::max(exponent, 1) - bias - mantissa)));
    }
    return numbers;
}

// The nearest number's code, of two the even one.
uint8_t code_of(float quotient, const std::vector<float>& numbers) {
    if (std::isnan(quotient)) return 0x7f;
    const uint8_t sign = std::signbit(quotient) ? 0x80 : 0;
    const double magnitude = std::min(std::fabs(quotient), numbers.back());
    const auto above = std::lower_bound(numbers.begin(), numbers.end(), magnitude) - numbers.begin();
    if (above == 0) return sign;
    const double high = numbers[above] - magnitude, low = magnitude - numbers[above - 1];
    const bool up = high < low || (high == low && above % 2 == 0);
    return static_cast<uint8_t>(sign | (up ? above : above - 1));
}

float scale_of(float largest, float most, int rounding) {
    if (largest == 0.0f) return 1.0f;
    const auto power = [](double exponent) { return static_cast<float>(std::ldexp(1.0, static_cast<int>(std::max(exponent, -126.0)))); };
    if (rounding == KPT_ROUND_DOWN) return power(std::floor(std::log2(largest)) - std::floor(std::log2(most)));
    const float scale = std::max(largest / most, 1.17549435e-38f);
    return rounding == KPT_ROUND_UP ? power(std::ceil(std::log2(static_cast<double>(scale)))) : scale;
}

void check_quantize(Random& random, const Case& c) {
    begin_case(
        "kpt_quantize of %s to %s, %lld matrices of %lld x %lld, blocks of %lld x %lld, gap %lld, rounding %d, given %d, %d "
        "threads",
        name_of(c.dtype), name_of(c.format), static_cast<long long>(c.matrices), static_cast<long long>(c.matrix_rows),
        static_cast<long long>(c.columns), static_cast<long long>(c.block_rows), static_cast<long long>(c.block_columns),
        static_cast<long long>(c.gap), c.rounding, c.given, c.threads);
    const int64_t rows = c.matrices * c.matrix_rows;
    Rows x = Rows::random(random, c.dtype, rows, c.columns, c.gap, 4.0);
    const double odd[] = {0.0, -0.0, INFINITY, -INFINITY, std::nan(""), 1e-6, 300.0};
    for (int64_t i = 0; i < rows * c.columns; i++) {
        if (random.below(6) == 0) x.set(i / c.columns, i % c.columns, random.one_of(odd));
    }
    const std::vector<float> numbers = numbers_of(c.format);
    // Blocks of rows within each matrix; where all share a scale there is one.
    const int64_t high = c.block_rows == 0 ? rows : c.block_rows, wide = c.block_rows == 0 ? c.columns : c.block_columns;
    const int64_t down = c.block_rows == 0 ? 1 : c.matrices * ((c.matrix_rows + high - 1) / high), across = (c.columns + wide - 1) / wide;
    const auto block_of = [&](int64_t row, int64_t column) {
        if (c.block_rows == 0) return int64_t{0};
        const int64_t band = row / c.matrix_rows * ((c.matrix_rows + high - 1) / high) + row % c.matrix_rows / high;
        return band * across + column / wide;
    };
    std::vector<float> largest(down * across, 0.0f), scale;
    const auto at = [&](int64_t row, int64_t column) { return static_cast<float>(x.values[row * c.columns + column]); };
    for (int64_t i = 0; i < rows * c.columns; i++) {
        const float value = std::fabs(at(i / c.columns, i % c.columns));
        float& top = largest[block_of(i / c.columns, i % c.columns)];
        if (std::isfinite(value)) top = std::max(top, value);
    }
    for (float top : largest) {
        scale.push_back(c.given ? static_cast<float>(random.between(-0.1, 2.0)) : scale_of(top, numbers.back(), c.rounding));
    }
    Array<float> own = c.given ? Array<float>(scale) : Array<float>(static_cast<int64_t>(scale.size()));
    Array<uint8_t> codes(rows * c.columns);
    x.memory.freeze();
    if (c.given) own.freeze();
    const struct kpt_quantize args{x.view(), codes.data(), own.data(), rows, c.columns, c.matrix_rows, c.block_rows,
                                   c.block_columns, c.format, c.given, c.rounding, c.threads};
    CHECK(kernels.quantize(&args) == KPT_OK, "it returned an error");
    CHECK(own.values() == scale, "a scale is wrong");
    const std::vector<uint8_t> got = codes.values();
    for (int64_t i = 0; i < rows * c.columns; i++) {
        const float value = at(i / c.columns, i % c.columns), by = scale[block_of(i / c.columns, i % c.columns)];
        const uint8_t want = code_of(value / by, numbers);
        CHECK(got[i] == want, "%g over %g is %#x, not %#x", static_cast<double>(value), static_cast<double>(by), got[i], want);
    }
}

}  // namespace

void test_quantize() {
    Random random(10);
    constexpr int64_t sizes[] = {1, 2, 3, 15, 16, 17, 31, 33, 128, 129, 257};
    for (int dtype : {KPT_FLOAT32, KPT_BFLOAT16, KPT_FLOAT16}) {
        for (int format : {KPT_FLOAT8_E4M3FN, KPT_FLOAT8_E5M2}) {
            for (int i = 0; i < 40; i++) {
                Case c{};
                c.dtype = dtype;
                c.format = format;
                c.rounding = static_cast<int>(random.below(3));
                c.matrices = 1 + random.below(2);
                c.matrix_rows = random.one_of(sizes);
                c.columns = random.one_of(sizes);
                const int64_t kind = random.below(5);
                c.block_rows = kind == 0 ? 0 : kind == 3 ? 128 : 1;
                c.block_columns = kind <= 1 ? c.columns : kind == 4 ? 32 : 128;
                c.gap = kind > 0 && random.coin() ? 3 : 0;
                c.given = random.coin();
                c.threads = random.coin() ? 3 : 1;
                check_quantize(random, c);
            }
        }
    }
}

}  // namespace test
