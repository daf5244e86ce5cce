#include "dot.h"

#include "dot_columns.h"
#include "dot_rows.h"

namespace kpt {

Staging staging_for(int32_t x_dtype, const kpt_matrices& weight, int64_t inner) {
    const bool small = size_of(weight.dtype) == 1;
    const bool exact = x_dtype == KPT_BFLOAT16 || size_of(x_dtype) == 1;
    const bool bf16 = KPT_HAS_BF16_DOT && exact && weight.stride_k == 1 && weight.scales_of != KPT_SCALES_K &&
                      (small || weight.dtype == KPT_BFLOAT16);
    return Staging{bf16, bf16 && small, inner};
}

void stage(const Staging& staging, const float* values, int64_t begin, int64_t count, void* row) {
    constexpr int64_t group = Staging::group;
    const auto part = [&](int64_t i) { return i < count ? load(values + i, count - i) : vf{}; };
    for (int64_t k = 0; k < count; k += group) {
        if (!staging.bf16) {
            float* out = static_cast<float*>(row) + begin + k;
            for (int64_t i = 0; i < group; i += W) store(out + i, part(k + i));
            continue;
        }
        bfloat16 some[group];
        for (int64_t i = 0; i < group; i += W) store(some + i, part(k + i));
        bfloat16* out = static_cast<bfloat16*>(row) + begin + k;
        for (int64_t octet = 0; octet < 8; octet++) {
            const int64_t place = staging.octets ? (octet & 1) * 4 + octet / 2 : octet;
            memcpy(out + place * 8, some + octet * 8, 8 * sizeof(bfloat16));
        }
    }
}

void widen_all(const void* values, int32_t dtype, int64_t count, float* out) {
    with_type(dtype, [&](auto type) {
        const auto* in = static_cast<const decltype(type)*>(values);
        for (int64_t i = 0; i < count; i += W) store(out + i, load(in + i, count - i), count - i);
    });
}

void narrow_all(const float* values, int64_t count, int32_t dtype, void* out) {
    with_float_type(dtype, [&](auto type) {
        auto* to = static_cast<decltype(type)*>(out);
        for (int64_t i = 0; i < count; i += W) store(to + i, load(values + i, count - i), count - i);
    });
}

void multiply(const Product& product) {
    with_type(product.weight.dtype, [&](auto type) {
        using T = decltype(type);
        if (product.weight.stride_k != 1) {
            multiply_columns<T>(product);
#if KPT_HAS_BF16_DOT
        } else if (product.staging.bf16) {
            // Of the dtypes only these are ever staged so.
            if constexpr (sizeof(T) == 1 || is_bfloat16<T>) multiply_rows<Bfloat16Dot<T>>(product);
#endif
#if defined(__AVX2__)
        } else if constexpr (sizeof(T) == 1) {
            multiply_rows<HalfDot<T>>(product);
#endif
        } else {
            multiply_rows<FloatDot<T>>(product);
        }
    });
}

}  // namespace kpt
