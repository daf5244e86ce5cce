// What the kernels of moe.experts read of the routing.
#pragma once

#include "simd.h"

namespace kpt {

KPT_INLINE int64_t pairs_of(const struct ::kpt_experts& p) { return p.tokens * p.top_k; }

// The expert of a pair of token and choice, -1 if it is not here.
KPT_INLINE int64_t expert_of(const struct ::kpt_experts& p, int64_t pair) {
    const int64_t expert = p.index_is_int64 ? static_cast<const int64_t*>(p.index)[pair]
                                            : static_cast<const int32_t*>(p.index)[pair];
    return expert >= 0 && expert < p.experts ? expert : -1;
}

// What a pair's result is multiplied by.
KPT_INLINE float weight_of(const struct ::kpt_experts& p, int64_t pair) {
    float value = 0;
    with_float_type(p.weights.dtype, [&](auto type) {
        using T = decltype(type);
        value = widen(static_cast<const T*>(p.weights.data)[pair]);
    });
    return value;
}

KPT_INLINE bool is_gated(const struct ::kpt_experts& p) { return p.act.kind <= KPT_REGLU; }

}  // namespace kpt
