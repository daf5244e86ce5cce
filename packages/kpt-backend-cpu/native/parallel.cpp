#include "parallel.h"

#include <pthread.h>
#include <sched.h>

#include "kpt_cpu.h"

// glibc 2.34 gave these a new version as they moved into libc, and kept the one that older systems have, too. Asking for
// that one lets a library that was built on a new system load on an old one, where Python itself brings libpthread.
#if defined(__GLIBC__) && defined(__x86_64__) && defined(__LP64__)
asm(".symver pthread_create, pthread_create@GLIBC_2.2.5\n.symver pthread_join, pthread_join@GLIBC_2.2.5");
#elif defined(__GLIBC__) && defined(__aarch64__)
asm(".symver pthread_create, pthread_create@GLIBC_2.17\n.symver pthread_join, pthread_join@GLIBC_2.17");
#endif

namespace kpt {

namespace {

using OpenMPParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using OpenMPNumber = int (*)();

OpenMPParallel openmp_parallel = nullptr;
OpenMPNumber openmp_thread_num = nullptr;

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

struct Region {
    void (*body)(int, void*);
    void* data;
};

void run_in_openmp(void* pointer) {
    const Region& region = *static_cast<Region*>(pointer);
    region.body(openmp_thread_num(), region.data);
}

struct Start {
    const Region* region;
    int rank;
};

void* run_in_thread(void* pointer) {
    const Start& start = *static_cast<Start*>(pointer);
    start.region->body(start.rank, start.region->data);
    return nullptr;
}

void run_in_threads(const Region& region, int threads) {
    constexpr int most = 256;
    if (threads > most) threads = most;
    pthread_t handles[most];
    Start starts[most];
    int started = 1;
    for (; started < threads; started++) {
        starts[started] = Start{&region, started};
        if (pthread_create(&handles[started], nullptr, run_in_thread, &starts[started]) != 0) break;
    }
    region.body(0, region.data);
    for (int rank = 1; rank < started; rank++) pthread_join(handles[rank], nullptr);
}

}  // namespace

void Tasks::wait(int64_t count) const {
    // Spins shortly, then yields: who has the last task may be waiting for this core.
    for (int spins = 0; done_.load(std::memory_order_acquire) < count; spins++) {
        if (spins < 2000) relax();
        else sched_yield();
    }
}

void run_parallel(int threads, void (*body)(int, void*), void* data) {
    Region region{body, data};
    if (threads <= 1) {
        body(0, data);
    } else if (openmp_parallel != nullptr) {
        openmp_parallel(run_in_openmp, &region, static_cast<unsigned>(threads), 0);
    } else {
        run_in_threads(region, threads);
    }
}

}  // namespace kpt

extern "C" void kpt_cpu_use_openmp(void* parallel, void* thread_num) {
    kpt::openmp_thread_num = reinterpret_cast<kpt::OpenMPNumber>(thread_num);
    kpt::openmp_parallel = reinterpret_cast<kpt::OpenMPParallel>(parallel);
}
