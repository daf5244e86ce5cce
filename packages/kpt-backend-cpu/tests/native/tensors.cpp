#include "tensors.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace test {

Place place = Place::kExact;

namespace {

struct Format {
    const char* name;
    int64_t size;
    int exponent_bits, mantissa_bits;
    bool has_infinity;
};

constexpr Format formats[] = {
    {"float32", 4, 8, 23, true},       {"bfloat16", 2, 8, 7, true},    {"float16", 2, 5, 10, true},
    {"float8_e4m3fn", 1, 4, 3, false}, {"float8_e5m2", 1, 5, 2, true},
};

int64_t page() { return sysconf(_SC_PAGESIZE); }

int shifts = 0;

void check_untouched(const char* what, const uint8_t* begin, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i++) CHECK(begin[i] == 0xff, "%s: a gap between rows was written", what);
}

}  // namespace

int64_t size_of(int dtype) { return formats[dtype].size; }
const char* name_of(int dtype) { return formats[dtype].name; }
double rounding_of(int dtype) { return std::ldexp(1.0, -1 - formats[dtype].mantissa_bits); }

double decode(int dtype, const uint8_t* bits) {
    const Format& f = formats[dtype];
    uint32_t all = 0;
    std::memcpy(&all, bits, f.size);
    const uint32_t mantissa = all & ((1u << f.mantissa_bits) - 1), top = (1u << f.exponent_bits) - 1;
    const uint32_t exponent = all >> f.mantissa_bits & top;
    const double sign = all >> (f.exponent_bits + f.mantissa_bits) ? -1.0 : 1.0;
    const int bias = static_cast<int>(top / 2), smallest = 1 - bias - f.mantissa_bits;
    if (f.has_infinity && exponent == top) {
        return mantissa == 0 ? sign * std::numeric_limits<double>::infinity() : std::nan("");
    }
    if (!f.has_infinity && exponent == top && mantissa == (1u << f.mantissa_bits) - 1) return std::nan("");
    if (exponent == 0) return sign * std::ldexp(mantissa, smallest);
    return sign * std::ldexp(mantissa + (1u << f.mantissa_bits), smallest + static_cast<int>(exponent) - 1);
}

void encode(int dtype, double value, uint8_t* bits) {
    const Format& f = formats[dtype];
    const uint32_t top = (1u << f.exponent_bits) - 1, sign = std::signbit(value);
    const int smallest = 1 - static_cast<int>(top / 2) - f.mantissa_bits;
    uint32_t magnitude = top << f.mantissa_bits;
    if (std::isnan(value)) {
        magnitude |= (1u << f.mantissa_bits) - 1;
    } else if (!std::isinf(value)) {
        int exponent = 0;
        std::frexp(value, &exponent);
        // In units of the last place, those of subnormal numbers at least.
        const int unit = std::max(exponent - 1 - f.mantissa_bits, smallest);
        const auto units = static_cast<uint32_t>(std::ldexp(std::fabs(value), -unit));
        magnitude = units + (static_cast<uint32_t>(unit - smallest) << f.mantissa_bits);
    }
    const uint32_t all = magnitude | sign << (f.exponent_bits + f.mantissa_bits);
    std::memcpy(bits, &all, f.size);
}

Memory::Memory(int64_t bytes, int64_t element) : bytes_(bytes) {
    if (place == Place::kExact) {
        const int64_t shift = shifts++ % 3 == 1 ? element : 0;
        base_ = static_cast<uint8_t*>(std::malloc(bytes + shift));
        data_ = base_ + shift;
    } else {
        const int64_t inside = (bytes + page() - 1) / page() * page();
        mapped_ = inside + 2 * page();
        void* all = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(all != MAP_FAILED, "the test itself found no memory");
        base_ = static_cast<uint8_t*>(all);
        if (inside > 0) mprotect(base_ + page(), inside, PROT_READ | PROT_WRITE);
        data_ = base_ + page() + (place == Place::kEnd ? inside - bytes : 0);
    }
    if (bytes > 0) std::memset(data_, 0xff, bytes);
}

Memory& Memory::operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    std::swap(mapped_, other.mapped_);
    return *this;
}

Memory::~Memory() {
    if (mapped_ > 0) munmap(base_, mapped_);
    else std::free(base_);
}

void Memory::freeze() {
    if (mapped_ > 2 * page()) mprotect(base_ + page(), mapped_ - 2 * page(), PROT_READ);
}

template <class T>
Array<T>::Array(const std::vector<T>& values) : Array(static_cast<int64_t>(values.size())) {
    if (!values.empty()) std::memcpy(memory_.data(), values.data(), memory_.bytes());
}

template <class T>
std::vector<T> Array<T>::values() const {
    const int64_t count = memory_.bytes() / static_cast<int64_t>(sizeof(T));
    return count > 0 ? std::vector<T>(data(), data() + count) : std::vector<T>();
}

template class Array<float>;
template class Array<int32_t>;
template class Array<uint8_t>;
template class Array<int64_t>;

Rows::Rows(int dtype, int64_t rows, int64_t columns, int64_t gap)
    : dtype(dtype),
      rows(rows),
      columns(columns),
      stride(columns + gap),
      // The gap behind the last row is nobody's.
      memory(rows > 0 ? ((rows - 1) * stride + columns) * size_of(dtype) : 0, size_of(dtype)),
      values(rows * columns, std::nan("")) {}

Rows Rows::random(Random& random, int dtype, int64_t rows, int64_t columns, int64_t gap, double range) {
    Rows out(dtype, rows, columns, gap);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < columns; c++) out.set(r, c, random.between(-range, range));
    }
    return out;
}

void Rows::set(int64_t row, int64_t column, double value) {
    encode(dtype, value, at(row, column));
    values[row * columns + column] = decode(dtype, at(row, column));
}

std::vector<double> Rows::read(const char* what) const {
    std::vector<double> out(rows * columns);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < columns; c++) out[r * columns + c] = decode(dtype, at(r, c));
        if (r + 1 < rows) check_untouched(what, at(r, columns), (stride - columns) * size_of(dtype));
    }
    return out;
}

Matrices::Matrices(int dtype, int64_t experts, int64_t inner, int64_t columns, bool n_contiguous, int64_t gap)
    : dtype(dtype),
      experts(experts),
      inner(inner),
      columns(columns) {
    const int64_t line = (n_contiguous ? columns : inner) + gap, lines = n_contiguous ? inner : columns;
    stride_k = n_contiguous ? line : 1;
    stride_n = n_contiguous ? 1 : line;
    stride_e = lines * line + gap;
    const bool empty = experts * inner * columns == 0;
    const int64_t count = empty ? 0 : (experts - 1) * stride_e + (inner - 1) * stride_k + (columns - 1) * stride_n + 1;
    memory = Memory(count * size_of(dtype), size_of(dtype));
    values.assign(experts * inner * columns, std::nan(""));
}

Matrices Matrices::random(
    Random& random, int dtype, int64_t experts, int64_t inner, int64_t columns, bool n_contiguous, int64_t gap,
    int scales_of, double range) {
    Matrices out(dtype, experts, inner, columns, n_contiguous, gap);
    int64_t of_k = 1, of_n = 1;
    std::vector<float> scales;
    if (scales_of != KPT_SCALES_NONE) {
        const int64_t block = scales_of == KPT_SCALES_BLOCK ? 128 : 1;
        if (scales_of != KPT_SCALES_N) of_k = (inner + block - 1) / block;
        if (scales_of != KPT_SCALES_K) of_n = (columns + block - 1) / block;
        const bool turned = random.coin();
        out.scales_of = scales_of;
        out.stride_sk = turned ? 1 : of_n;
        out.stride_sn = turned ? of_k : 1;
        out.stride_se = of_k * of_n;
        for (int64_t i = 0; i < experts * of_k * of_n; i++)
            scales.push_back(static_cast<float>(random.between(0.5, 1.5)));
    }
    for (int64_t e = 0; e < experts; e++) {
        for (int64_t k = 0; k < inner; k++) {
            for (int64_t n = 0; n < columns; n++) {
                encode(dtype, random.between(-range, range), out.at(e, k, n));
                double& value = out.values[(e * inner + k) * columns + n];
                value = decode(dtype, out.at(e, k, n));
                if (scales_of == KPT_SCALES_NONE) continue;
                const bool block = scales_of == KPT_SCALES_BLOCK;
                const int64_t row = scales_of == KPT_SCALES_N ? 0 : block ? k / 128 : k;
                const int64_t column = scales_of == KPT_SCALES_K ? 0 : block ? n / 128 : n;
                value *= static_cast<double>(scales[e * out.stride_se + row * out.stride_sk + column * out.stride_sn]);
            }
        }
    }
    out.scale = Array<float>(scales);
    return out;
}

kpt_matrices Matrices::view() const {
    return {memory.data(),
            stride_e,
            stride_k,
            stride_n,
            dtype,
            scales_of,
            scales_of != KPT_SCALES_NONE ? scale.data() : nullptr,
            stride_se,
            stride_sk,
            stride_sn};
}

std::vector<double> Matrices::read(const char* what) const {
    std::vector<uint8_t> owned(memory.bytes());
    std::vector<double> out(experts * inner * columns);
    for (int64_t e = 0; e < experts; e++) {
        for (int64_t k = 0; k < inner; k++) {
            for (int64_t n = 0; n < columns; n++) {
                out[(e * inner + k) * columns + n] = decode(dtype, at(e, k, n));
                std::memset(owned.data() + (at(e, k, n) - memory.data()), 1, size_of(dtype));
            }
        }
    }
    for (int64_t i = 0; i < memory.bytes(); i++) {
        if (owned[i] == 0) check_untouched(what, memory.data() + i, 1);
    }
    return out;
}

void compare(
    const char* what, const std::vector<double>& got, const std::vector<double>& want,
    const std::vector<double>& tolerance) {
    CHECK(got.size() == want.size() && got.size() == tolerance.size(), "%s: sizes differ", what);
    for (size_t i = 0; i < got.size(); i++) {
        const bool same = std::isnan(want[i]) ? std::isnan(got[i]) : got[i] == want[i];
        const bool close = std::isfinite(want[i]) && std::fabs(got[i] - want[i]) <= tolerance[i];
        CHECK(
            same || close, "%s: number %zu of %zu is %.9g, must be %.9g within %.3g", what, i, got.size(), got[i],
            want[i], tolerance[i]);
    }
}

void compare_bits(const char* what, const Memory& got, const Memory& again) {
    CHECK(
        got.bytes() == again.bytes() && (got.bytes() == 0 || std::memcmp(got.data(), again.data(), got.bytes()) == 0),
        "%s: a second call gave other bits", what);
}

}  // namespace test
