// Threads: PyTorch's own OpenMP pool where its address is known, else threads that live for one region.
#pragma once

#include <atomic>
#include <cstdint>

namespace kpt {

// A point that all threads of a region must reach before any goes on. Spins shortly, then yields: a thread may have lost
// its core to another process.
class Barrier {
public:
    void wait(int threads);

private:
    std::atomic<int> arrived_{0};
    std::atomic<int> rounds_{0};
};

// Hands out 0, 1, 2... to whoever asks. Who gets which number varies; kernels give each number's results one owner, so
// that their bits do not.
class Counter {
public:
    int64_t next() { return next_.fetch_add(1, std::memory_order_relaxed); }
    void reset() { next_.store(0, std::memory_order_relaxed); }

private:
    std::atomic<int64_t> next_{0};
};

// One thread of a region.
struct Member {
    int rank, size;
    Barrier* barrier;
    void wait() const {
        if (size > 1) barrier->wait(size);
    }
    // The part of 0..count that is this thread's if all get about as much, in steps of `step`.
    void share(int64_t count, int64_t step, int64_t& begin, int64_t& end) const {
        const int64_t steps = (count + step - 1) / step;
        begin = steps * rank / size * step;
        end = steps * (rank + 1) / size * step;
        if (begin > count) begin = count;
        if (end > count) end = count;
    }
};

void run_parallel(int threads, void (*body)(const Member&, void*), void* data);

// Run `body(member)` on up to `threads` threads at once.
template <class Body>
void parallel(int threads, Body&& body) {
    run_parallel(
        threads, [](const Member& member, void* data) { (*static_cast<Body*>(data))(member); }, &body);
}

// Memory for a call, in huge pages where it is large: fresh small pages cost more than the arithmetic on them. Null `get()`
// if there is none.
class Scratch {
public:
    explicit Scratch(int64_t bytes);
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    void* get() const { return data_; }

private:
    void* data_;
    int64_t bytes_;
};

}  // namespace kpt
