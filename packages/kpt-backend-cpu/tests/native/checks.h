// What every test uses: the kernels under test, the case that is being run, random numbers, and how a test fails.
#pragma once

#include <cstdint>

#include "kpt_cpu.h"

namespace test {

// The functions of the library under test.
struct Library {
    decltype(&::kpt_grouped_mm) grouped_mm;
    decltype(&::kpt_grouped_mm_wgrad) grouped_mm_wgrad;
    decltype(&::kpt_experts_decode) experts_decode;
    decltype(&::kpt_experts_forward) experts_forward;
    decltype(&::kpt_experts_backward) experts_backward;
    decltype(&::kpt_sort) sort;
    decltype(&::kpt_top_k_gating) top_k_gating;
    decltype(&::kpt_top_k_gating_backward) top_k_gating_backward;
    decltype(&::kpt_attention_forward) attention_forward;
    decltype(&::kpt_attention_backward) attention_backward;
    decltype(&::kpt_attention_paged) attention_paged;
    decltype(&::kpt_quantize) quantize;
    decltype(&::kpt_rms_norm) rms_norm;
    decltype(&::kpt_cpu_interface) interface;
    decltype(&::kpt_cpu_instruction_sets) instruction_sets;
    decltype(&::kpt_cpu_use_openmp) use_openmp;
};

extern Library kernels;

// Say in words what is run from here on; it is printed when something fails, a crash too.
void begin_case(const char* format, ...) __attribute__((format(printf, 1, 2)));
int64_t cases_begun();
void print_case();

// Print the case and the message, and end the program.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

#define CHECK(condition, ...)                      \
    do {                                           \
        if (!(condition)) test::fail(__VA_ARGS__); \
    } while (false)

// xorshift64*: the same numbers everywhere.
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du) {}
    uint64_t bits() {
        state_ ^= state_ >> 12;
        state_ ^= state_ << 25;
        state_ ^= state_ >> 27;
        return state_ * 0x2545f4914f6cdd1du;
    }
    // One of 0..count - 1.
    int64_t below(int64_t count) { return static_cast<int64_t>((bits() >> 11) % static_cast<uint64_t>(count)); }
    bool coin() { return below(2) == 1; }
    double between(double low, double high) { return low + (high - low) * static_cast<double>(bits() >> 11) * 0x1p-53; }
    template <class T, int N>
    T one_of(const T (&choices)[N]) {
        return choices[below(N)];
    }

private:
    uint64_t state_;
};

// How many allocations and threads succeed before one fails; negative: all do. `failed` counts those that were refused.
struct Faults {
    int64_t allocations_left = -1, threads_left = -1;
    int64_t allocations = 0, failed = 0;
};

extern Faults faults;

void test_sort();
void test_grouped_mm();
void test_grouped_mm_wgrad();
void test_experts_forward();
void test_experts_backward();
void test_top_k_gating();
void test_top_k_gating_backward();
void test_attention();
void test_attention_paged();
void test_quantize();
void test_rms_norm();
void test_failures();
void test_threads();

}  // namespace test
