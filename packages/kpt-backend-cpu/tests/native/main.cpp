// PROGRAM LIBRARY [exact|end|begin]: test the kernels of a library, whose instruction set this machine must have.
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tensors.h"

#if defined(__SANITIZE_ADDRESS__)
#define TEST_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TEST_SANITIZED 1
#endif
#endif

#ifdef TEST_SANITIZED
extern "C" void __sanitizer_set_death_callback(void (*callback)());

// UndefinedBehaviorSanitizer ends the program by another way.
extern "C" __attribute__((visibility("default"))) void __ubsan_on_report() { test::print_case(); }
#endif

namespace test {

Library kernels;
Faults faults;

namespace {

char case_text[1024] = "before the first case";
int64_t case_count = 0;

#ifndef TEST_SANITIZED
void on_signal(int number) {
    const char* name = number == SIGSEGV || number == SIGBUS ? "memory was touched that is not the tensors'"
                       : number == SIGALRM                   ? "no end was in sight"
                                                             : "a signal ended it";
    // Only what is allowed in a handler.
    for (const char* part : {"FAILED: ", name, "\n  in ", static_cast<const char*>(case_text), "\n"}) {
        if (write(STDERR_FILENO, part, std::strlen(part)) < 0) break;
    }
    _exit(1);
}
#endif

template <class Function>
void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    CHECK(function != nullptr, "the library has no %s", name);
}

void load(const char* path) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    CHECK(library != nullptr, "%s", dlerror());
    find(library, "kpt_grouped_mm", kernels.grouped_mm);
    find(library, "kpt_grouped_mm_wgrad", kernels.grouped_mm_wgrad);
    find(library, "kpt_experts_decode", kernels.experts_decode);
    find(library, "kpt_experts_forward", kernels.experts_forward);
    find(library, "kpt_experts_backward", kernels.experts_backward);
    find(library, "kpt_sort", kernels.sort);
    find(library, "kpt_top_k_gating", kernels.top_k_gating);
    find(library, "kpt_top_k_gating_backward", kernels.top_k_gating_backward);
    find(library, "kpt_attention_forward", kernels.attention_forward);
    find(library, "kpt_attention_backward", kernels.attention_backward);
    find(library, "kpt_attention_paged", kernels.attention_paged);
    find(library, "kpt_quantize", kernels.quantize);
    find(library, "kpt_rms_norm", kernels.rms_norm);
    find(library, "kpt_cpu_interface", kernels.interface);
    find(library, "kpt_cpu_instruction_sets", kernels.instruction_sets);
    find(library, "kpt_cpu_use_openmp", kernels.use_openmp);
}

void test_library() {
    begin_case("the functions that tell what a library is");
    CHECK(
        kernels.interface() == KPT_CPU_INTERFACE, "its interface is %d, not %d", kernels.interface(),
        KPT_CPU_INTERFACE);
    const char* sets = kernels.instruction_sets();
    const size_t size = std::strlen(sets);
    CHECK(size >= 8 && std::strcmp(sets + size - 8, "baseline") == 0, "baseline is not the last of '%s'", sets);
}

}  // namespace

void begin_case(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(case_text, sizeof case_text, format, arguments);
    va_end(arguments);
    case_count++;
}

int64_t cases_begun() { return case_count; }

void print_case() { fprintf(stderr, "  in %s\n", case_text); }

void fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "FAILED: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    print_case();
    fflush(stdout);
    _exit(1);
}

}  // namespace test

int main(int count, char** arguments) {
    using namespace test;
    if (count < 2) {
        fprintf(stderr, "usage: %s LIBRARY [exact|end|begin]\n", arguments[0]);
        return 2;
    }
    const char* where = count > 2 ? arguments[2] : "exact";
    place = std::strcmp(where, "end") == 0     ? Place::kEnd
            : std::strcmp(where, "begin") == 0 ? Place::kBegin
                                               : Place::kExact;
#ifdef TEST_SANITIZED
    __sanitizer_set_death_callback(print_case);
#else
    for (int number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT}) signal(number, on_signal);
#endif
    load(arguments[1]);
    test_library();
    const struct {
        const char* name;
        void (*run)();
    } tests[] = {
        {"sort", test_sort},
        {"grouped_mm", test_grouped_mm},
        {"grouped_mm_wgrad", test_grouped_mm_wgrad},
        {"experts_forward, experts_decode", test_experts_forward},
        {"experts_backward", test_experts_backward},
        {"top_k_gating", test_top_k_gating},
        {"top_k_gating_backward", test_top_k_gating_backward},
        {"attention", test_attention},
        {"attention_paged", test_attention_paged},
        {"quantize", test_quantize},
        {"rms_norm", test_rms_norm},
        {"failing allocations and threads", test_failures},
        {"several callers, OpenMP", test_threads},
    };
    for (const auto& test : tests) {
        const int64_t before = cases_begun();
        const auto start = std::chrono::steady_clock::now();
        test.run();
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        printf(
            "  %-34s %5lld cases  %5.1f s\n", test.name, static_cast<long long>(cases_begun() - before),
            seconds.count());
        fflush(stdout);
    }
    return 0;
}
