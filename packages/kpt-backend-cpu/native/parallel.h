// Threads: PyTorch's own OpenMP pool where its address is known, else threads that live for one region.
#pragma once

#include <atomic>
#include <cstdint>

namespace kpt {

// Tasks 0, 1, 2... of a region. Every thread takes the next one until there is none, and goes on when all are done, by
// whomever: a thread that begins late, or lost its core to another process, holds up its own task, and the end of the region,
// but nothing between. Who gets which varies; each number of a result has one task that makes it, so that its bits do not.
class Tasks {
public:
    // Call `body(task)` for tasks below `count`, and wait until these are done. They may be asked for in parts, with a
    // greater `count` each time: `own` is the task that this thread took and has yet to do, -1 at first.
    template <class Body>
    void up_to(int64_t count, int64_t& own, Body&& body) {
        if (own < 0) own = next_.fetch_add(1, std::memory_order_relaxed);
        while (own < count) {
            body(own);
            done_.fetch_add(1, std::memory_order_release);
            own = next_.fetch_add(1, std::memory_order_relaxed);
        }
        wait(count);
    }

    template <class Body>
    void all(int64_t count, Body&& body) {
        int64_t own = -1;
        up_to(count, own, static_cast<Body&&>(body));
    }

    // Call `body(begin, end)` for parts of 0..count, of `step` each but for the last.
    template <class Body>
    void in_steps(int64_t count, int64_t step, Body&& body) {
        all((count + step - 1) / step, [&](int64_t task) {
            const int64_t begin = task * step;
            body(begin, count - begin < step ? count : begin + step);
        });
    }

private:
    void wait(int64_t count) const;

    std::atomic<int64_t> next_{0};
    std::atomic<int64_t> done_{0};
};

void run_parallel(int threads, void (*body)(int rank, void*), void* data);

// Run `body(rank)` on up to `threads` threads at once, rank 0 among them.
template <class Body>
void parallel(int threads, Body&& body) {
    run_parallel(
        threads, [](int rank, void* data) { (*static_cast<Body*>(data))(rank); }, &body);
}

}  // namespace kpt
