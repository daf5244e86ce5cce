// Memory for intermediate results.
#pragma once

#include <cstdint>

namespace kpt {

// Memory for a call, in huge pages where it is large: fresh small pages cost more than the arithmetic on them. Nothing is
// known of what it holds. Null `get()` if there is none.
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

// What lies behind one another in a Scratch, each on a cache line of its own: first all are counted, then their addresses
// are asked for.
class Layout {
public:
    template <class T>
    struct Place {
        int64_t at;
        T* in(const Scratch& scratch) const { return reinterpret_cast<T*>(static_cast<char*>(scratch.get()) + at); }
    };

    template <class T>
    Place<T> add(int64_t count) {
        const int64_t at = size_;
        size_ += (count * static_cast<int64_t>(sizeof(T)) + line - 1) / line * line;
        return {at};
    }
    int64_t size() const { return size_; }

private:
    static constexpr int64_t line = 64;
    int64_t size_ = 0;
};

}  // namespace kpt
