// fp8.quantize: the largest of the numbers that share a scale, the scale, and codes rounded to nearest even, bit for bit.
#include "kpt_cpu.h"
#include "parallel.h"
#include "scratch.h"
#include "simd.h"

using namespace kpt;

namespace {

using Given = struct kpt_quantize;

// Numbers of a task: as many as keep a thread busy for some microseconds.
constexpr int64_t kNumbers = 1 << 14;

// A format: the bits below its mantissa in float32, what its exponents are less than float32's, its largest number, and the
// number whose last bit in float32 is the format's smallest.
struct Format {
    int shift, less, normal;
    float most, magic;
};
constexpr Format kE4m3{20, 120 << 3, 121 << 23, 448.0f, 16384.0f};
constexpr Format kE5m2{21, 112 << 2, 113 << 23, 57344.0f, 128.0f};

KPT_INLINE vf finite_magnitude(vf x) {
    const vi bits = as_bits(x) & 0x7fffffff;
    return as_floats(bits & (bits < 0x7f800000));
}

template <class T>
float largest_of(const T* x, int64_t count, float so_far) {
    vf most = splat(so_far);
    for (int64_t i = 0; i < count; i += W) most = larger(finite_magnitude(load(x + i, count - i)), most);
    for (int i = 0; i < W; i++) so_far = most[i] > so_far ? most[i] : so_far;
    return so_far;
}

float power_of_two(int exponent) {
    exponent = exponent < -126 ? -126 : exponent > 127 ? 127 : exponent;
    const int32_t bits = (exponent + 127) << 23;
    float out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

float scale_of(float largest, const Format& form, int rounding) {
    if (largest == 0.0f) return 1.0f;
    int exponent, of_most;
    if (rounding == KPT_ROUND_DOWN) {
        __builtin_frexpf(form.most, &of_most);
        __builtin_frexpf(largest, &exponent);
        return power_of_two(exponent - of_most);
    }
    constexpr float least = 1.17549435e-38f;
    float scale = largest / form.most;
    scale = scale < least ? least : scale;
    if (rounding == KPT_ROUND_NONE) return scale;
    const float mantissa = __builtin_frexpf(scale, &exponent);
    return power_of_two(mantissa == 0.5f ? exponent - 1 : exponent);
}

KPT_INLINE vi codes_of(vf x, vf scale, const Format& form) {
    vf quotient = x / scale;
    quotient = quotient > form.most ? splat(form.most) : quotient;
    quotient = quotient < -form.most ? splat(-form.most) : quotient;
    const vi bits = as_bits(quotient), magnitude = bits & 0x7fffffff;
    const vi odd = (magnitude >> form.shift) & 1;
    // Unsigned: of NaN, which has a code of its own below, it may go over.
    const vu rounded = (vu)magnitude + ((1u << (form.shift - 1)) - 1u) + (vu)odd;
    const vi normal = (vi)(rounded >> form.shift) - form.less;
    const vi small = as_bits(as_floats(magnitude) + form.magic) - as_bits(splat(form.magic));
    const vi code = (magnitude < form.normal ? small : normal) | ((bits >> 24) & 0x80);
    return magnitude > 0x7f800000 ? splat_int(0x7f) : code;
}

template <class T>
void write_codes(const T* x, int64_t count, float scale, const Format& form, uint8_t* codes) {
    const vf own = splat(scale);
    for (int64_t i = 0; i < count; i += W) {
        const vb bytes = __builtin_convertvector(codes_of(load(x + i, count - i), own, form), vb);
        memcpy(codes + i, &bytes, count - i < W ? count - i : W);
    }
}

template <class T>
class Kernel {
public:
    explicit Kernel(const Given& p)
        : p_(p), form_(p.dtype == KPT_FLOAT8_E5M2 ? kE5m2 : kE4m3), x_(static_cast<const T*>(p.x.data)),
          codes_(static_cast<uint8_t*>(p.codes)) {}

    // Bands of rows, of each the blocks of columns.
    int in_blocks(int threads) const {
        const int64_t a_matrix = (p_.matrix_rows + p_.block_rows - 1) / p_.block_rows;
        const int64_t bands = p_.rows / p_.matrix_rows * a_matrix;
        const int64_t of_band = p_.block_rows * p_.columns, step = of_band < kNumbers ? kNumbers / of_band : 1;
        Tasks work;
        parallel(threads, [&](int) {
            work.in_steps(bands, step, [&](int64_t begin, int64_t end) {
                for (int64_t band = begin; band < end; band++) {
                    const int64_t in_matrix = band % a_matrix * p_.block_rows, left = p_.matrix_rows - in_matrix;
                    run(band, band / a_matrix * p_.matrix_rows + in_matrix, left < p_.block_rows ? left : p_.block_rows);
                }
            });
        });
        return KPT_OK;
    }

    // One scale for all, which lie behind one another.
    int as_one(int threads) const {
        const int64_t count = p_.rows * p_.columns, parts = (count + kNumbers - 1) / kNumbers;
        const Scratch space(parts * static_cast<int64_t>(sizeof(float)));
        if (space.get() == nullptr) return KPT_NO_MEMORY;
        float* tops = static_cast<float*>(space.get());
        Tasks looking, writing;
        parallel(threads, [&](int) {
            float scale = p_.given ? p_.scale[0] : 0.0f;
            if (!p_.given) {
                looking.in_steps(count, kNumbers, [&](int64_t begin, int64_t end) {
                    tops[begin / kNumbers] = largest_of(x_ + begin, end - begin, 0.0f);
                });
                scale = scale_of(largest_of(tops, parts, 0.0f), form_, p_.rounding);
            }
            writing.in_steps(count, kNumbers, [&](int64_t begin, int64_t end) {
                if (begin == 0 && !p_.given) p_.scale[0] = scale;
                write_codes(x_ + begin, end - begin, scale, form_, codes_ + begin);
            });
        });
        return KPT_OK;
    }

private:
    void run(int64_t band, int64_t first, int64_t rows) const {
        const int64_t blocks = (p_.columns + p_.block_columns - 1) / p_.block_columns;
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t column = block * p_.block_columns, left = p_.columns - column;
            const int64_t count = left < p_.block_columns ? left : p_.block_columns;
            float* scale = p_.scale + band * blocks + block;
            if (!p_.given) {
                float top = 0.0f;
                for (int64_t row = first; row < first + rows; row++) {
                    top = largest_of(x_ + row * p_.x.stride + column, count, top);
                }
                *scale = scale_of(top, form_, p_.rounding);
            }
            for (int64_t row = first; row < first + rows; row++) {
                const T* from = x_ + row * p_.x.stride + column;
                write_codes(from, count, *scale, form_, codes_ + row * p_.columns + column);
            }
        }
    }

    const Given& p_;
    const Format form_;
    const T* x_;
    uint8_t* codes_;
};

}  // namespace

extern "C" int kpt_quantize(const struct kpt_quantize* given) {
    const int threads = given->rows * given->columns < 2 * kNumbers ? 1 : given->threads;
    int status = KPT_OK;
    with_float_type(given->x.dtype, [&](auto type) {
        const Kernel<decltype(type)> kernel(*given);
        status = given->block_rows == 0 ? kernel.as_one(threads) : kernel.in_blocks(threads);
    });
    return status;
}
