// Allocations and threads that fail, many callers at once, and an OpenMP that gives fewer threads than it is asked for.
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#include <cstring>

#include "tensors.h"

namespace {

// Whether one more may succeed.
bool refused(int64_t& left) {
    if (left < 0) return false;
    if (left == 0) {
        test::faults.failed++;
        return true;
    }
    left--;
    return false;
}

template <class Function>
Function next(const char* name) {
    return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

}  // namespace

// Symbols of the program come before those of the C library where the library under test looks for them.
extern "C" __attribute__((visibility("default"))) int posix_memalign(
    void** out, size_t alignment, size_t size) noexcept {
    static const auto real = next<int (*)(void**, size_t, size_t)>("posix_memalign");
    test::faults.allocations++;
    return refused(test::faults.allocations_left) ? ENOMEM : real(out, alignment, size);
}

extern "C" __attribute__((visibility("default"))) int pthread_create(
    pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*), void* data) noexcept {
    static const auto real =
        next<int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*)>("pthread_create");
    return refused(test::faults.threads_left) ? EAGAIN : real(thread, attributes, body, data);
}

namespace test {

namespace {

// One call of each kernel, large enough for several threads, into `out`.
struct Work {
    Random random{11};
    Rows x, grad, weights, h, logits, gating_grad;
    Matrices weight, up, down;
    Array<int32_t> offsets, few_offsets, order;
    Array<int64_t> index;
    static constexpr int64_t rows = 160, few = 9, inner = 90, columns = 70, experts = 4, top_k = 2;

    Work() {
        x = Rows::random(random, KPT_FLOAT32, rows, inner, 0, 1.0);
        grad = Rows::random(random, KPT_FLOAT32, rows, inner, 0, 1.0);
        weights = Rows::random(random, KPT_FLOAT32, rows, top_k, 0, 1.0);
        h = Rows::random(random, KPT_FLOAT32, rows * top_k, columns, 0, 1.0);
        logits = Rows::random(random, KPT_FLOAT32, rows * 64, 64, 0, 1.0);
        gating_grad = Rows::random(random, KPT_FLOAT32, rows * 64, top_k, 0, 1.0);
        weight = matrices(inner, columns);
        down = matrices(columns / 2, inner);
        up = matrices(inner, columns);
        offsets = Array<int32_t>(std::vector<int32_t>{40, 80, 120, 160});
        few_offsets = Array<int32_t>(std::vector<int32_t>{2, 4, 6, 9});
        std::vector<int32_t> sorted, ends;
        std::vector<int64_t> ids;
        for (int64_t i = 0; i < rows * top_k; i++) ids.push_back(i % experts);
        for (int64_t e = 0; e < experts; e++) {
            for (int64_t i = e; i < rows * top_k; i += experts) sorted.push_back(static_cast<int32_t>(i));
            ends.push_back(static_cast<int32_t>(sorted.size()));
        }
        order = Array<int32_t>(sorted);
        offsets_of_pairs = Array<int32_t>(ends);
        index = Array<int64_t>(ids);
    }

    Matrices matrices(int64_t k, int64_t n) {
        return Matrices::random(random, KPT_FLOAT32, experts, k, n, false, 0, KPT_SCALES_NONE, 1.0);
    }

    kpt_experts experts_arguments(const kpt_rows& out, int threads, bool sorted, const kpt_rows& kept) const {
        return {
            x.view(),
            out,
            index.data(),
            1,
            weights.view(),
            up.view(),
            down.view(),
            {},
            {},
            {KPT_SWIGLU, 0, 0, 1.0f, 0.0f, 0.0f},
            sorted ? order.data() : nullptr,
            sorted ? offsets_of_pairs.data() : nullptr,
            kept,
            sorted ? rows : few,
            top_k,
            experts,
            inner,
            columns,
            columns / 2,
            threads};
    }

    static constexpr int kinds = 10;
    static const char* name(int kind) {
        static const char* const names[kinds] = {
            "kpt_grouped_mm",     "kpt_grouped_mm of few rows", "kpt_grouped_mm_wgrad", "kpt_experts_forward",
            "kpt_experts_decode", "kpt_experts_backward",       "kpt_top_k_gating",     "kpt_top_k_gating_backward",
            "kpt_attention_forward", "kpt_attention_backward"};
        return names[kind];
    }
    // How many numbers its result has.
    static int64_t size(int kind) {
        const int64_t sizes[kinds] = {rows * columns, rows * columns, experts * inner * columns, rows * inner,
                                      few * inner,    rows * inner,   rows * 64 * top_k,         rows * 64 * 64,
                                      rows * inner,   rows * inner};
        return sizes[kind];
    }

    int run(int kind, int threads, float* out) const {
        const kpt_rows as_rows{out, kind <= 1 ? columns : kind == 7 ? 64 : inner, KPT_FLOAT32};
        if (kind <= 1) {
            const struct kpt_grouped_mm args{
                x.view(), as_rows, weight.view(), nullptr, 0,      kind == 0 ? offsets.data() : few_offsets.data(),
                rows,     inner,   columns,       experts, threads, nullptr, {}};
            return kernels.grouped_mm(&args);
        }
        if (kind == 2) {
            const struct kpt_grouped_mm_wgrad args{
                x.view(), {h.memory.data(), columns, KPT_FLOAT32}, out, offsets.data(), rows, inner, columns, experts,
                threads};
            return kernels.grouped_mm_wgrad(&args);
        }
        if (kind == 3 || kind == 4) {
            const kpt_experts args = experts_arguments(as_rows, threads, kind == 3, {});
            return kind == 3 ? kernels.experts_forward(&args) : kernels.experts_decode(&args);
        }
        if (kind == 5) {
            const struct kpt_experts_backward args{
                experts_arguments({}, threads, true, h.view()), grad.view(), as_rows, {}, {}, {}, {}, {}};
            return kernels.experts_backward(&args);
        }
        if (kind >= 8) return run_attention(kind == 9, threads, out);
        std::vector<int64_t> chosen(rows * 64 * top_k);
        for (size_t i = 0; i < chosen.size(); i++) chosen[i] = static_cast<int64_t>(i % 2);
        std::vector<float> given(rows * 64 * top_k, 0.5f);
        const struct kpt_top_k_gating gating{logits.view(), nullptr,   kind == 6 ? out : given.data(),
                                             chosen.data(), rows * 64, 64,
                                             top_k,         1,         1,
                                             KPT_SIGMOID,   1,         1.0f,
                                             threads};
        if (kind == 6) return kernels.top_k_gating(&gating);
        const struct kpt_top_k_gating_backward args{
            gating, reinterpret_cast<float*>(gating_grad.memory.data()), as_rows};
        return kernels.top_k_gating_backward(&args);
    }

private:
    // Two heads of 80 tokens: in one tile each, so that the number of threads changes no sum.
    int run_attention(bool backward, int threads, float* out) const {
        const auto heads = [](const void* data) {
            return kpt_heads{const_cast<void*>(data), rows * inner, rows / 2 * inner, inner, KPT_FLOAT32};
        };
        std::vector<float> largest(rows), total(rows), common(rows), result(rows * inner), unused(rows * inner);
        struct kpt_attention args {};
        args.q = args.v = heads(x.memory.data());
        args.k = heads(grad.memory.data());
        args.out = heads(backward ? result.data() : out);
        args.largest = largest.data();
        args.total = total.data();
        args.batch = 1;
        args.heads = args.kv_heads = 2;
        args.queries = args.keys = rows / 2;
        args.dim = args.value_dim = inner;
        args.causal = 1;
        args.scale = 0.1f;
        args.threads = threads;
        if (!backward) return kernels.attention_forward(&args);
        const struct kpt_attention_backward given{args, heads(grad.memory.data()), nullptr, common.data(), heads(out), {}, {}, nullptr, nullptr, nullptr};
        return kernels.attention_backward(&given);
    }

    Array<int32_t> offsets_of_pairs;
};

std::vector<float> result_of(const Work& work, int kind, int threads) {
    Array<float> out(Work::size(kind));
    CHECK(work.run(kind, threads, out.data()) == KPT_OK, "%s returned an error", Work::name(kind));
    return out.values();
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

struct Caller {
    const Work* work;
    int first;
    const std::vector<float>* wanted;
    bool right = true;
};

void* call_all(void* pointer) {
    Caller& caller = *static_cast<Caller*>(pointer);
    for (int turn = 0; turn < 3 * Work::kinds; turn++) {
        const int kind = (caller.first + turn) % Work::kinds;
        caller.right = caller.right && same(result_of(*caller.work, kind, 3), caller.wanted[kind]);
    }
    return nullptr;
}

// An OpenMP of which each region gets `given` threads, or as many as it asked for if these are fewer.
thread_local int openmp_rank = 0;
int openmp_given = 1;

struct Body {
    void (*function)(void*);
    void* data;
    int rank;
};

void* run_body(void* pointer) {
    const Body& body = *static_cast<Body*>(pointer);
    openmp_rank = body.rank;
    body.function(body.data);
    return nullptr;
}

void openmp_parallel(void (*function)(void*), void* data, unsigned asked, unsigned) {
    pthread_t threads[8];
    Body bodies[8];
    const int given = openmp_given < static_cast<int>(asked) ? openmp_given : static_cast<int>(asked);
    for (int rank = 1; rank < given; rank++) {
        bodies[rank] = {function, data, rank};
        pthread_create(&threads[rank], nullptr, run_body, &bodies[rank]);
    }
    bodies[0] = {function, data, 0};
    run_body(&bodies[0]);
    for (int rank = 1; rank < given; rank++) pthread_join(threads[rank], nullptr);
}

int openmp_thread_num() { return openmp_rank; }

}  // namespace

void test_failures() {
    const Work work;
    for (int kind = 0; kind < Work::kinds; kind++) {
        begin_case("%s where an allocation fails", Work::name(kind));
        // By one thread: memory for several may be that of the call before, which is kept, and nothing would be allocated.
        const int64_t before = faults.allocations;
        const std::vector<float> wanted = result_of(work, kind, 1);
        const int64_t needed = faults.allocations - before;
#ifdef __linux__
        CHECK(needed > 0, "its allocations are not seen here");
#endif
        for (int64_t allowed = 0; allowed < needed; allowed++) {
            Array<float> out(Work::size(kind));
            faults.allocations_left = allowed;
            const int status = work.run(kind, 1, out.data());
            faults.allocations_left = -1;
            CHECK(
                status == KPT_NO_MEMORY, "it returned %d after %lld allocations", status,
                static_cast<long long>(allowed));
            const uint8_t* bytes = reinterpret_cast<const uint8_t*>(out.data());
            for (int64_t i = 0; i < Work::size(kind) * 4; i++)
                CHECK(bytes[i] == 0xff, "a part of the result was written");
        }
        for (int64_t allowed = 0; allowed < 2; allowed++) {
            begin_case(
                "%s of 3 threads of which %lld can be started", Work::name(kind), static_cast<long long>(allowed + 1));
            faults.threads_left = allowed;
            const std::vector<float> got = result_of(work, kind, 3);
            faults.threads_left = -1;
            CHECK(same(got, wanted), "the result is another one");
        }
    }
    CHECK(faults.failed > 0, "nothing failed");
}

void test_threads() {
    const Work work;
    std::vector<float> wanted[Work::kinds];
    for (int kind = 0; kind < Work::kinds; kind++) {
        begin_case("%s with many threads", Work::name(kind));
        wanted[kind] = result_of(work, kind, 3);
        CHECK(same(result_of(work, kind, 17), wanted[kind]), "17 threads gave another result than 3");
    }
    begin_case("4 callers at once, 3 threads each");
    pthread_t threads[4];
    Caller callers[4];
    for (int i = 0; i < 4; i++) {
        callers[i] = {&work, 2 * i, wanted};
        pthread_create(&threads[i], nullptr, call_all, &callers[i]);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], nullptr);
        CHECK(callers[i].right, "caller %d got another result than alone", i);
    }
    kernels.use_openmp(
        reinterpret_cast<void*>(openmp_parallel), reinterpret_cast<void*>(openmp_thread_num));
    for (openmp_given = 1; openmp_given <= 3; openmp_given++) {
        for (int kind = 0; kind < Work::kinds; kind++) {
            begin_case("%s in an OpenMP that gives %d threads of 3", Work::name(kind), openmp_given);
            CHECK(same(result_of(work, kind, 3), wanted[kind]), "the result is another one");
        }
    }
    kernels.use_openmp(nullptr, nullptr);
}

}  // namespace test
