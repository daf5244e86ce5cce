// norm.rms: rows divided by the root of their mean square and multiplied by weights, in float32, rounded once.
#include "kpt_cpu.h"
#include "parallel.h"
#include "simd.h"

using namespace kpt;

namespace {

// Numbers of a task: as many as keep a thread busy for some microseconds.
constexpr int64_t kNumbers = 1 << 14;
constexpr int kSums = 4;  // that grow beside one another, so that none waits for itself

template <class T>
void normalise(const struct kpt_rms_norm& p, int64_t row) {
    const T *x = static_cast<const T*>(p.x.data) + row * p.x.stride, *weight = static_cast<const T*>(p.weight);
    T* out = static_cast<T*>(p.out.data) + row * p.out.stride;
    vf squares[kSums] = {};
    int64_t at = 0;
    for (; at + kSums * W <= p.columns; at += kSums * W) {
        for (int i = 0; i < kSums; i++) {
            const vf value = load(x + at + i * W);
            squares[i] += value * value;
        }
    }
    for (; at < p.columns; at += W) {
        const vf value = load(x + at, p.columns - at);
        squares[0] += value * value;
    }
    const vf sums = (squares[0] + squares[1]) + (squares[2] + squares[3]);
    float total = 0.0f;
    for (int i = 0; i < W; i++) total += sums[i];
    const float factor = 1.0f / __builtin_sqrtf(total / static_cast<float>(p.columns) + p.eps);
    for (at = 0; at < p.columns; at += W) {
        const int64_t left = p.columns - at;
        store(out + at, load(x + at, left) * factor * load(weight + at, left), left);
    }
}

}  // namespace

extern "C" int kpt_rms_norm(const struct kpt_rms_norm* given) {
    const struct kpt_rms_norm& p = *given;
    with_float_type(p.x.dtype, [&](auto type) {
        const auto rows = [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; row++) normalise<decltype(type)>(p, row);
        };
        if (p.rows * p.columns < 2 * kNumbers) return rows(0, p.rows);
        const int64_t step = p.columns < kNumbers ? kNumbers / p.columns : 1;
        Tasks work;
        parallel(p.threads, [&](int) { work.in_steps(p.rows, step, rows); });
    });
    return KPT_OK;
}
