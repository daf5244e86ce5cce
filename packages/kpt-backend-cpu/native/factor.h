// The factors of a matrix product as they are stored.
#pragma once

#include "simd.h"

namespace kpt {

// What numbers are multiplied by: `data[(line >> line_shift) * line_stride + (inside >> inside_shift) * inside_stride]`.
struct Scale {
    const float* data = nullptr;
    int64_t line_stride = 0, inside_stride = 0;
    int line_shift = 0, inside_shift = 0;

    KPT_INLINE float at(const Scale& s, int64_t line, int64_t inside) {
        return s.data[(line >> s.line_shift) * s.line_stride + (inside >> s.inside_shift) * s.inside_stride];
    }
    // Those of `count` numbers of a line from `inside` on.
    KPT_INLINE vf of(const Scale& s, int64_t line, int64_t inside, int64_t count) {
        const int64_t last = inside + count - 1;
        if (s.inside_stride == 0 || inside >> s.inside_shift == last >> s.inside_shift) return splat(at(s, line, inside));
        vf out = {};
        for (int64_t i = 0; i < count && i < W; i++) out[i] = at(s, line, inside + i);
        return out;
    }
};

// A factor: lines of contiguous numbers. Along the inner size a line is a row (of the left) or column (of the right), and
// the inner size lies inside of it; across it is the other way round.
struct Factor {
    const void* data;
    int64_t stride;                 // of lines, in elements
    const int32_t* index = nullptr; // which line is meant by number 0, 1...; null for itself
    int dtype;
    bool along;
    Scale scale; // applied to float32 slots; by the number of a line before `index`
};

}  // namespace kpt
