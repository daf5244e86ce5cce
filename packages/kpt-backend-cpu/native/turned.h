// Products of few rows by AMX, turned round: the matrix is the left factor.
//
// Of few rows nearly all time goes into packing the matrix. As the left factor it is packed without transposing it, and the
// rows are the columns of a single panel. Sums stay in the tiles over the whole inner size, or over a block of scales.
#pragma once

#include "packing.h"

#if KPT_HAS_TILES

namespace kpt {

// Lines of so many numbers are packed at a time: they stay in the first cache.
constexpr int64_t kFewRows = kPanel, kLines = 2 * kTile, kLineNumbers = 256;
static_assert(kLineNumbers <= Pairs::depth * Pairs::per_slot);

// What the sums of a line, which is a column of the result, are multiplied by: that of all the inner size, or of 128 of it.
class LineScales {
public:
    LineScales() = default;
    LineScales(const kpt_matrices& m, int64_t expert, bool lines_are_n)
        : data_(m.scale + expert * m.stride_se), of_line_(lines_are_n ? m.stride_sn : m.stride_sk),
          of_inner_(lines_are_n ? m.stride_sk : m.stride_sn), in_blocks_(m.scales_of == KPT_SCALES_BLOCK) {}
    bool in_blocks() const { return in_blocks_; }
    float of_line(int64_t line) const { return data_ != nullptr && !in_blocks_ ? data_[line * of_line_] : 1.0f; }
    float of_block(int64_t line, int64_t k) const { return data_[(line >> 7) * of_line_ + (k >> 7) * of_inner_]; }

private:
    const float* data_ = nullptr;
    int64_t of_line_ = 0, of_inner_ = 0;
    bool in_blocks_ = false;
};

// Add the products of some slots of 32 packed lines by those of 16 rows, or 32 (kWide), to the tiles 0 to 3, which begin as
// zeros when tiles are configured.
template <bool kWide>
void add_turned(const slot* left, const slot* panel, int64_t depth) {
    asm volatile("" ::: "memory");  // the intrinsics do not say that they read memory
    for (int64_t s = 0; s < depth; s += kTile) {
        _tile_loadd(6, panel + s * kPanel, kPanel * 4);
        if constexpr (kWide) _tile_loadd(7, panel + s * kPanel + W, kPanel * 4);
        _tile_loadd(4, left + s, kPitch * 4);
        _tile_loadd(5, left + kTile * kPitch + s, kPitch * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (kWide) {
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}

// Store those tiles, `kPanel` apart, and set them to zero.
template <bool kWide>
void store_turned(float* out) {
    _tile_stored(0, out, kPanel * 4);
    _tile_stored(2, out + kTile * kPanel, kPanel * 4);
    if constexpr (kWide) {
        _tile_stored(1, out + W, kPanel * 4);
        _tile_stored(3, out + kTile * kPanel + W, kPanel * 4);
    }
    asm volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// `sums[line][row]`, kPanel apart, of the matrix's lines `line .. line + lines` (32 at most, of one block of scales) and the
// rows in `panel`.
template <bool kWide>
void multiply_lines(
    slot* left, const Factor& matrix, int64_t line, int64_t lines, const slot* panel, int64_t inner,
    const LineScales& scales, float* sums) {
    const int64_t step = scales.in_blocks() ? 128 : kLineNumbers;
    for (int64_t k = 0; k < inner; k += step) {
        const int64_t numbers = inner - k < step ? inner - k : step;
        pack_lines<Pairs>(matrix, line, lines, k, numbers, left);
        add_turned<kWide>(left, panel + k / Pairs::per_slot * kPanel, depth_of<Pairs>(numbers));
        if (!scales.in_blocks()) continue;
        alignas(64) float own[kLines * kPanel];
        store_turned<kWide>(own);
        const float scale = scales.of_block(line, k);
        for (int64_t i = 0; i < kLines; i++) {
            for (int64_t r = 0; r < (kWide ? kPanel : W); r += W) {
                const vf value = load(own + i * kPanel + r) * scale;
                float* p = sums + i * kPanel + r;
                store(p, k > 0 ? load(p) + value : value);
            }
        }
    }
    if (!scales.in_blocks()) store_turned<kWide>(sums);
}

// The lines `first .. first + count` of the matrix by `rows` packed rows: columns of `out`, whose rows are `pitch` apart.
inline void multiply_run(
    const Block& block, const Factor& matrix, int64_t first, int64_t count, int64_t rows, int64_t inner,
    const LineScales& scales, float* out, int64_t pitch) {
    const auto multiply = rows > W ? multiply_lines<true> : multiply_lines<false>;
    for (int64_t line = first, end = first + count, next; line < end; line = next) {
        next = line + kLines < end ? line + kLines : end;
        if (scales.in_blocks() && next > (line | 127) + 1) next = (line | 127) + 1;
        alignas(64) float sums[kLines * kPanel];
        multiply(block.left, matrix, line, next - line, block.right, inner, scales, sums);
        for (int64_t i = 0; i < next - line; i++) {
            const float scale = scales.of_line(line + i);
            for (int64_t r = 0; r < rows; r++) out[r * pitch + line - first + i] = sums[i * kPanel + r] * scale;
        }
    }
}

}  // namespace kpt

#endif
