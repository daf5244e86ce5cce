// Factors of a matrix product, and how blocks of them are brought into the order in which the innermost loop reads them.
//
// What is multiplied lies in slots of 32 bits: a float32, or two bfloat16 that are neighbours along the inner size where
// the instruction set multiplies such pairs. The left factor's rows are copied as they are, [row][kPitch]; the right one's
// columns lie in panels [slot][kPanel]. Either may be stored along the inner size or across it, which needs a transpose.
// Rows and slots are multiplied `step` at a time: slots are filled up with zeros, rows with whatever is there.
#pragma once

#include "byte_tables.h"
#include "product.h"
#include "tiles.h"
#include "transpose.h"

namespace kpt {

// float32 in a slot.
struct Singles {
    static constexpr int per_slot = 1, step = 1;
    // Runs of 256 lose 1.4 times as much in the sums, and are no faster.
    static constexpr int depth = kDepth / 2;
    struct InUse {};
    KPT_INLINE vf multiply_add(vf left, vf right, vf sum) { return left * right + sum; }
};

#if KPT_HAS_BF16_DOT
// Two bfloat16 in a slot; their products are summed in float32.
struct Pairs {
    static constexpr int per_slot = 2, depth = kDepth;
#if KPT_HAS_TILES
    static constexpr int step = kTile;
    using InUse = TilesInUse;
#else
    static constexpr int step = 1;
    struct InUse {};
#endif
    KPT_INLINE vf multiply_add(vf left, vf right, vf sum) {
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
    }
};
#endif

// Slots that `numbers` of the inner size take.
template <class Kind>
constexpr int64_t depth_of(int64_t numbers) {
    return round_up((numbers + Kind::per_slot - 1) / Kind::per_slot, Kind::step);
}

template <class T>
KPT_INLINE const T* line_of(const Factor& f, int64_t line) {
    return static_cast<const T*>(f.data) + (f.index != nullptr ? f.index[line] : line) * f.stride;
}

// W slots of one line along the inner size, from number `inside` on, `count` numbers of them; the rest is zero.
template <class Kind, class T>
KPT_INLINE vi slots_along(const Factor& f, const T* p, int64_t line, int64_t inside, int64_t count) {
    if constexpr (Kind::per_slot == 1) {
        vf value = load(p + inside, count);
        if (f.scale.data != nullptr) value *= Scale::of(f.scale, line, inside, count < W ? count : W);
        return as_bits(value);
    }
#if KPT_HAS_BF16_DOT
    else if constexpr (sizeof(T) == 2) {
        if (count >= 2 * W) return (vi)_mm512_loadu_si512(p + inside);
        return (vi)_mm512_maskz_loadu_epi16((1u << count) - 1, p + inside);
    } else {
        const __mmask32 there = count >= 2 * W ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
        return (vi)bfloat16_of<T>(_mm256_maskz_loadu_epi8(there, p + inside));
    }
#endif
}

// How many vectors of slots are made of a line at a time: numbers of 8 bits are looked up 64 at once.
template <class Kind, class T>
constexpr int vectors_along = Kind::per_slot == 2 && sizeof(T) == 1 ? 2 : 1;

// The same, so many vectors of them.
template <class Kind, class T>
KPT_INLINE void vectors_of(const Factor& f, const T* p, int64_t line, int64_t inside, int64_t count, vi* out) {
    if constexpr (vectors_along<Kind, T> == 1) {
        out[0] = slots_along<Kind, T>(f, p, line, inside, count);
    }
#if KPT_HAS_BF16_DOT
    else {
        const __mmask64 there = count >= 4 * W ? ~__mmask64{0} : (__mmask64{1} << count) - 1;
        __m512i both[2];
        bfloat16_of<T>(_mm512_maskz_loadu_epi8(there, p + inside), both);
        out[0] = (vi)both[0];
        out[1] = (vi)both[1];
    }
#endif
}

// W slots across: of the lines `line` and, for pairs, the next (zero if it is not below `end`), from `inside` on.
template <class Kind, class T>
KPT_INLINE vi slots_across(const Factor& f, int64_t line, int64_t end, int64_t inside, int64_t count) {
    vf first = load(line_of<T>(f, line) + inside, count);
    if constexpr (Kind::per_slot == 1) {
        if (f.scale.data != nullptr) first *= Scale::of(f.scale, line, inside, count < W ? count : W);
        return as_bits(first);
    } else {
        // What fits a bfloat16 has nothing in the lower half.
        const vf second = line + 1 < end ? load(line_of<T>(f, line + 1) + inside, count) : vf{};
        return (vi)((vu)first >> 16) | (as_bits(second) & splat_int(static_cast<int32_t>(0xffff0000)));
    }
}

// Runs are too short for the processor to foresee the next, so it is asked for: that many lines ahead.
constexpr int64_t kAhead = 8;

// A row of slots along, `numbers` of the inner size from `k` on; ends with whole vectors of zeros.
template <class Kind, class T>
void pack_lines_along(const Factor& f, int64_t row, int64_t rows, int64_t k, int64_t numbers, slot* out) {
    constexpr int64_t vectors = vectors_along<Kind, T>, step = W * Kind::per_slot * vectors;
    static_assert(Kind::depth % (W * vectors) == 0);
    for (int64_t r = 0; r < rows; r++, out += kPitch) {
        const T* p = line_of<T>(f, row + r);
        const T* later = line_of<T>(f, row + (r + kAhead < rows ? r + kAhead : r)) + k;
        // Of few rows the same ones come next.
        if (KPT_HAS_TILES && rows <= 2 * W) later = p + k + numbers;
        for (int64_t i = 0; i < numbers; i += step) {
            __builtin_prefetch(later + i);
            vi slots[vectors];
            vectors_of<Kind, T>(f, p, row + r, k + i, numbers - i, slots);
            memcpy(out + i / Kind::per_slot, slots, sizeof slots);
        }
    }
}

template <class Kind, class T>
void pack_lines_across(const Factor& f, int64_t row, int64_t rows, int64_t k, int64_t numbers, slot* out) {
    constexpr int64_t step = W * Kind::per_slot;
    const int64_t end = k + numbers;
    for (int64_t i = 0; i < numbers; i += step) {
        for (int64_t r = 0; r < rows; r += W) {
            const int64_t own = rows - r < W ? rows - r : W;
            vi block[W];
            for (int j = 0; j < W; j++) {
                const int64_t line = k + i + j * Kind::per_slot;
                block[j] = line < end ? slots_across<Kind, T>(f, line, end, row + r, own) : vi{};
            }
            transpose(block);
            for (int64_t j = 0; j < own; j++) memcpy(out + (r + j) * kPitch + i / Kind::per_slot, &block[j], sizeof(vi));
        }
    }
}

template <class Kind, class T>
void pack_panels_along(const Factor& f, int64_t column, int64_t columns, int64_t k, int64_t numbers, slot* out) {
    constexpr int64_t step = W * Kind::per_slot;
    const int64_t depth = depth_of<Kind>(numbers);
    for (int64_t c = 0; c < columns; c += kPanel, out += depth * kPanel) {
        for (int half = 0; half < 2; half++) {
            const int64_t own = columns - c - half * W;
            const T* lines[W];
            const T* later[W];
            for (int j = 0; j < W; j++) {
                const int64_t line = column + c + half * W + j;
                lines[j] = j < own ? line_of<T>(f, line) : nullptr;
                later[j] = line_of<T>(f, j + W < own ? line + W : column) + k;
            }
            for (int64_t i = 0; i < numbers; i += step) {
                vi block[W];
#pragma GCC unroll 16
                for (int j = 0; j < W; j++) {
                    const int64_t line = column + c + half * W + j;
                    __builtin_prefetch(later[j] + i);
                    block[j] = j < own ? slots_along<Kind, T>(f, lines[j], line, k + i, numbers - i) : vi{};
                }
                transpose(block);
                const int64_t first = i / Kind::per_slot, taken = depth - first < W ? depth - first : W;
                slot* to = out + first * kPanel + half * W;
                for (int64_t j = 0; j < taken; j++) memcpy(to + j * kPanel, &block[j], sizeof(vi));
            }
        }
    }
}

template <class Kind, class T>
void pack_panels_across(const Factor& f, int64_t column, int64_t columns, int64_t k, int64_t numbers, slot* out) {
    const int64_t depth = depth_of<Kind>(numbers), end = k + numbers;
    for (int64_t c = 0; c < columns; c += kPanel) {
        const int64_t filled = (numbers + Kind::per_slot - 1) / Kind::per_slot;
        memset(out + c * depth + filled * kPanel, 0, (depth - filled) * kPanel * sizeof(slot));
    }
    for (int64_t s = 0; k + s * Kind::per_slot < end; s++) {
        const int64_t line = k + s * Kind::per_slot;
        const int64_t later = line + kAhead * Kind::per_slot < end ? line + kAhead * Kind::per_slot : line;
        const T* soon[Kind::per_slot];
        for (int j = 0; j < Kind::per_slot; j++) soon[j] = line_of<T>(f, later + j < end ? later + j : later) + column;
        slot* to = out + s * kPanel;
        for (int64_t c = 0; c < columns; c += kPanel, to += depth * kPanel) {
            for (int half = 0; half < 2; half++) {
                const int64_t inside = c + half * W, own = columns - inside;
                for (int j = 0; j < Kind::per_slot; j++) __builtin_prefetch(soon[j] + inside);
                const vi slots = own > 0 ? slots_across<Kind, T>(f, line, end, column + inside, own) : vi{};
                memcpy(to + half * W, &slots, sizeof slots);
            }
        }
    }
}

template <class Kind, class Body>
KPT_INLINE void with_packable_type(int dtype, Body&& body) {
    if constexpr (Kind::per_slot == 1) {
        with_type(dtype, static_cast<Body&&>(body));
    } else if (dtype == KPT_BFLOAT16) {
        body(bfloat16{});
    } else if (dtype == KPT_FLOAT8_E4M3FN) {
        body(e4m3{});
    } else {
        body(e5m2{});
    }
}

// Rows of a left factor from `row` on, and `numbers` of its inner size from `k` on, at most Kind::depth slots of them.
template <class Kind>
void pack_lines(const Factor& f, int64_t row, int64_t rows, int64_t k, int64_t numbers, slot* out) {
    with_packable_type<Kind>(f.dtype, [&](auto type) {
        using T = decltype(type);
        if (f.along) pack_lines_along<Kind, T>(f, row, rows, k, numbers, out);
        else pack_lines_across<Kind, T>(f, row, rows, k, numbers, out);
    });
}

// Columns of a right factor likewise, in panels that are filled up with zeros.
template <class Kind>
void pack_panels(const Factor& f, int64_t column, int64_t columns, int64_t k, int64_t numbers, slot* out) {
    with_packable_type<Kind>(f.dtype, [&](auto type) {
        using T = decltype(type);
        if (f.along) pack_panels_along<Kind, T>(f, column, columns, k, numbers, out);
        else pack_panels_across<Kind, T>(f, column, columns, k, numbers, out);
    });
}

}  // namespace kpt
