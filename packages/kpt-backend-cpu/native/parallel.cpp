#include "parallel.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "kpt_cpu.h"

namespace kpt {

namespace {

using OpenMPParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using OpenMPNumber = int (*)();

OpenMPParallel openmp_parallel = nullptr;
OpenMPNumber openmp_thread_num = nullptr;
OpenMPNumber openmp_num_threads = nullptr;

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

struct Region {
    void (*body)(const Member&, void*);
    void* data;
    Barrier barrier;
};

void run_in_openmp(void* pointer) {
    Region& region = *static_cast<Region*>(pointer);
    const Member member{openmp_thread_num(), openmp_num_threads(), &region.barrier};
    region.body(member, region.data);
}

struct Start {
    Region* region;
    int rank, size;
};

void* run_in_thread(void* pointer) {
    const Start& start = *static_cast<Start*>(pointer);
    start.region->body(Member{start.rank, start.size, &start.region->barrier}, start.region->data);
    return nullptr;
}

// How many threads there can be is known only once they are there, and a barrier must know: they wait for the number.
struct Gate {
    std::atomic<int> size{0};
};

struct Waiting {
    Region* region;
    Gate* gate;
    int rank;
};

void* run_when_counted(void* pointer) {
    const Waiting waiting = *static_cast<Waiting*>(pointer);
    int size;
    while ((size = waiting.gate->size.load(std::memory_order_acquire)) == 0) sched_yield();
    Start start{waiting.region, waiting.rank, size};
    return run_in_thread(&start);
}

void run_in_threads(Region& region, int threads) {
    constexpr int most = 256;
    if (threads > most) threads = most;
    pthread_t handles[most];
    Waiting waiting[most];
    Gate gate;
    int started = 1;
    for (; started < threads; started++) {
        waiting[started] = Waiting{&region, &gate, started};
        if (pthread_create(&handles[started], nullptr, run_when_counted, &waiting[started]) != 0) break;
    }
    gate.size.store(started, std::memory_order_release);
    Start start{&region, 0, started};
    run_in_thread(&start);
    for (int rank = 1; rank < started; rank++) pthread_join(handles[rank], nullptr);
}

constexpr int64_t huge_page = int64_t{1} << 21;
constexpr int64_t cache_line = 64;

}  // namespace

void Barrier::wait(int threads) {
    const int round = rounds_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
        arrived_.store(0, std::memory_order_relaxed);
        rounds_.store(round + 1, std::memory_order_release);
        return;
    }
    for (int spins = 0; rounds_.load(std::memory_order_acquire) == round; spins++) {
        if (spins < 2000) relax();
        else sched_yield();
    }
}

void run_parallel(int threads, void (*body)(const Member&, void*), void* data) {
    Region region{body, data, {}};
    if (threads <= 1) {
        body(Member{0, 1, &region.barrier}, data);
    } else if (openmp_parallel != nullptr) {
        openmp_parallel(run_in_openmp, &region, static_cast<unsigned>(threads), 0);
    } else {
        run_in_threads(region, threads);
    }
}

Scratch::Scratch(int64_t bytes) : data_(nullptr), bytes_(bytes > 0 ? bytes : 1) {
    if (bytes_ >= huge_page) {
        bytes_ = (bytes_ + huge_page - 1) / huge_page * huge_page;
        if (posix_memalign(&data_, huge_page, bytes_) != 0) data_ = nullptr;
#ifdef MADV_HUGEPAGE
        if (data_ != nullptr) madvise(data_, bytes_, MADV_HUGEPAGE);
#endif
    } else if (posix_memalign(&data_, cache_line, bytes_) != 0) {
        data_ = nullptr;
    }
}

Scratch::~Scratch() { free(data_); }

}  // namespace kpt

extern "C" void kpt_cpu_use_openmp(void* parallel, void* thread_num, void* num_threads) {
    kpt::openmp_thread_num = reinterpret_cast<kpt::OpenMPNumber>(thread_num);
    kpt::openmp_num_threads = reinterpret_cast<kpt::OpenMPNumber>(num_threads);
    kpt::openmp_parallel = reinterpret_cast<kpt::OpenMPParallel>(parallel);
}
