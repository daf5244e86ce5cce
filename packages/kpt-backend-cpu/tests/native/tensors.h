// Tensors whose memory ends where it must not be left, with the values that their bits stand for.
#pragma once

#include <cstddef>
#include <vector>

#include "checks.h"

namespace test {

// Where memory lies: as the sanitizer gives it, exactly as large as it is and now and then one element off; or with its
// last byte, or its first one, at a page that may not be touched.
enum class Place { kExact, kEnd, kBegin };

extern Place place;

int64_t size_of(int dtype);
const char* name_of(int dtype);
// Half of the distance of neighbours, relative.
double rounding_of(int dtype);
// What the bits of one number mean.
double decode(int dtype, const uint8_t* bits);
// Round toward zero.
void encode(int dtype, double value, uint8_t* bits);

// Bytes, all 0xff at first, which is NaN in every dtype.
class Memory {
public:
    Memory() = default;
    Memory(int64_t bytes, int64_t element);
    Memory(Memory&& other) noexcept { *this = static_cast<Memory&&>(other); }
    Memory& operator=(Memory&& other) noexcept;
    ~Memory();
    uint8_t* data() const { return data_; }
    int64_t bytes() const { return bytes_; }
    // Crash when it is written from here on, if it lies in pages of its own.
    void freeze();

private:
    uint8_t* data_ = nullptr;
    uint8_t* base_ = nullptr;
    int64_t bytes_ = 0, mapped_ = 0;
};

template <class T>
class Array {
public:
    Array() = default;
    explicit Array(const std::vector<T>& values);
    explicit Array(int64_t count) : memory_(count * static_cast<int64_t>(sizeof(T)), sizeof(T)) {}
    T* data() const { return reinterpret_cast<T*>(memory_.data()); }
    std::vector<T> values() const;
    void freeze() { memory_.freeze(); }

private:
    Memory memory_;
};

// [rows, columns] with gaps between rows.
struct Rows {
    int dtype = 0;
    int64_t rows = 0, columns = 0, stride = 0;
    Memory memory;
    std::vector<double> values;

    Rows() = default;
    // Full of NaN.
    Rows(int dtype, int64_t rows, int64_t columns, int64_t gap);
    // Numbers up to `range`.
    static Rows random(Random& random, int dtype, int64_t rows, int64_t columns, int64_t gap, double range);
    uint8_t* at(int64_t row, int64_t column) const { return memory.data() + (row * stride + column) * size_of(dtype); }
    void set(int64_t row, int64_t column, double value);
    kpt_rows view() const { return {memory.data(), stride, dtype}; }
    kpt_rows view_or_null(bool wanted) const { return wanted ? view() : kpt_rows{nullptr, 0, 0}; }
    // What is there now; fails if a gap was written.
    std::vector<double> read(const char* what) const;
};

// [experts, K, N], K or N contiguous, with gaps between lines and between experts, and scales.
struct Matrices {
    int dtype = 0, scales_of = 0;
    int64_t experts = 0, inner = 0, columns = 0, stride_e = 0, stride_k = 0, stride_n = 0;
    int64_t stride_se = 0, stride_sk = 0, stride_sn = 0;
    Memory memory;
    Array<float> scale;
    std::vector<double> values;  // scaled

    Matrices() = default;
    // Full of NaN.
    Matrices(int dtype, int64_t experts, int64_t inner, int64_t columns, bool n_contiguous, int64_t gap);
    static Matrices random(
        Random& random, int dtype, int64_t experts, int64_t inner, int64_t columns, bool n_contiguous, int64_t gap,
        int scales_of, double range);
    double value(int64_t expert, int64_t k, int64_t n) const { return values[(expert * inner + k) * columns + n]; }
    uint8_t* at(int64_t expert, int64_t k, int64_t n) const {
        return memory.data() + (expert * stride_e + k * stride_k + n * stride_n) * size_of(dtype);
    }
    kpt_matrices view() const;
    kpt_matrices view_or_null(bool wanted) const { return wanted ? view() : kpt_matrices{}; }
    std::vector<double> read(const char* what) const;
};

// Fail unless each number is within its tolerance of what is wanted, and NaN or infinite exactly where that is.
void compare(
    const char* what, const std::vector<double>& got, const std::vector<double>& want,
    const std::vector<double>& tolerance);
void compare_bits(const char* what, const Memory& got, const Memory& again);

}  // namespace test
