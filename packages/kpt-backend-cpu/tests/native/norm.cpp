#include <cmath>

#include "tensors.h"

namespace test {

namespace {

void check_rms_norm(Random& random, int dtype, int64_t rows, int64_t columns, int64_t gap, float eps, int threads) {
    begin_case(
        "kpt_rms_norm of %s, %lld x %lld, gap %lld, eps %g, %d threads", name_of(dtype), static_cast<long long>(rows),
        static_cast<long long>(columns), static_cast<long long>(gap), static_cast<double>(eps), threads);
    Rows x = Rows::random(random, dtype, rows, columns, gap, 3.0), weight = Rows::random(random, dtype, 1, columns, 0, 2.0);
    std::vector<double> want(rows * columns), allowed(rows * columns);
    for (int64_t row = 0; row < rows; row++) {
        if (random.below(8) == 0) x.set(row, random.below(columns), random.coin() ? std::nan("") : INFINITY);
        if (random.below(8) == 0) {
            for (int64_t i = 0; i < columns; i++) x.set(row, i, 0.0);
        }
        double total = 0.0;
        for (int64_t i = 0; i < columns; i++) total += x.values[row * columns + i] * x.values[row * columns + i];
        const double root = std::sqrt(total / static_cast<double>(columns) + static_cast<double>(eps));
        for (int64_t i = row * columns; i < (row + 1) * columns; i++) {
            want[i] = x.values[i] / root * weight.values[i - row * columns];
            allowed[i] = 1e-6 + std::fabs(want[i]) * (dtype == KPT_FLOAT32 ? 2e-6 : rounding_of(dtype) * 1.02);
        }
    }
    Rows out(dtype, rows, columns, gap);
    x.memory.freeze();
    weight.memory.freeze();
    const struct kpt_rms_norm args{x.view(), out.view(), weight.memory.data(), rows, columns, eps, threads};
    CHECK(kernels.rms_norm(&args) == KPT_OK, "it returned an error");
    compare("out", out.read("out"), want, allowed);
}

}  // namespace

void test_rms_norm() {
    Random random(11);
    constexpr int64_t widths[] = {1, 2, 7, 16, 17, 31, 64, 65, 127, 576, 2050};
    for (int dtype : {KPT_FLOAT32, KPT_BFLOAT16, KPT_FLOAT16}) {
        for (int64_t columns : widths) {
            for (int64_t rows : {0, 1, 3, 70}) {
                check_rms_norm(random, dtype, rows, columns, random.coin() ? 3 : 0, random.coin() ? 1e-6f : 0.5f, random.coin() ? 3 : 1);
            }
        }
    }
}

}  // namespace test
