// Transposing W by W numbers of 32 bits in registers.
#pragma once

#include <utility>

#include "simd.h"

namespace kpt {

// Lane l of the first result is a[l] where bit `Step` of l is 0, else b[l - Step]; of the second a[l + Step] or b[l].
template <int Step, int... Lane>
KPT_INLINE void exchange(vi& a, vi& b, std::integer_sequence<int, Lane...>) {
    const vi first = __builtin_shufflevector(a, b, ((Lane & Step) == 0 ? Lane : W + Lane - Step)...);
    b = __builtin_shufflevector(a, b, ((Lane & Step) == 0 ? Lane + Step : W + Lane)...);
    a = first;
}

template <int Step>
KPT_INLINE void exchange_all(vi* rows) {
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) {
        if ((i & Step) == 0) exchange<Step>(rows[i], rows[i + Step], std::make_integer_sequence<int, W>{});
    }
}

// Rows become columns: each step exchanges one bit of the row's number with that of the lane's.
KPT_INLINE void transpose(vi* rows) {
    exchange_all<1>(rows);
    exchange_all<2>(rows);
    if constexpr (W > 4) exchange_all<4>(rows);
    if constexpr (W > 8) exchange_all<8>(rows);
}

}  // namespace kpt
