// Products of few rows by AMX, turned round: the matrix is the left factor.
//
// Of few rows nearly all time goes into packing the matrix. As the left factor it is packed without transposing it, and the
// rows are the columns of a panel, or of some. Sums stay in the tiles over the whole inner size, or over a block of scales.
#pragma once

#include "packing.h"
#include "transpose.h"

#if KPT_HAS_TILES

namespace kpt {

// Lines of so many numbers are packed at a time: they stay in the first cache.
constexpr int64_t kFewRows = kPanel, kLines = 2 * kTile, kLineNumbers = 256;
static_assert(kLineNumbers <= Pairs::depth * Pairs::per_slot);
// Up to so many rows all of some lines are packed for all panels; each further panel reads them again from the second cache.
// Shorter lines than those cost less as a right factor: results are written across.
constexpr int64_t kTurnedRows = 4 * kFewRows, kLongLines = 1024;
// Parts of the inner size that are packed, and where the next part of the lines lies.
constexpr int64_t kPartNumbers = Pairs::depth * Pairs::per_slot, kPartSlots = kLines * kPitch;
static_assert(kPartNumbers % kLineNumbers == 0 && kPartNumbers % 128 == 0);

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

// `sums[line][row]`, kPanel apart, of the matrix's lines from `line` on (32 at most, of one block of scales) and the rows in
// `panel`. `packed(k, numbers)` gives so many numbers of the lines from `k` on.
template <bool kWide, class Packed>
void multiply_lines(
    const Packed& packed, int64_t line, const slot* panel, int64_t inner, const LineScales& scales, float* sums) {
    const int64_t step = scales.in_blocks() ? 128 : kLineNumbers;
    for (int64_t k = 0; k < inner; k += step) {
        const int64_t numbers = inner - k < step ? inner - k : step;
        add_turned<kWide>(packed(k, numbers), panel + k / Pairs::per_slot * kPanel, depth_of<Pairs>(numbers));
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

// Write the sums of `lines` lines from `line` on as columns of `out`, whose rows are `pitch` apart, times the lines' scales.
inline void write_turned(
    const float* sums, int64_t line, int64_t lines, int64_t rows, const LineScales& scales, float* out, int64_t pitch) {
    if (lines < kLines) {  // more would be another's
        for (int64_t i = 0; i < lines; i++) {
            const float scale = scales.of_line(line + i);
            for (int64_t r = 0; r < rows; r++) out[r * pitch + i] = sums[i * kPanel + r] * scale;
        }
        return;
    }
    for (int64_t i = 0; i < kLines; i += W) {
        for (int64_t r = 0; r < rows; r += W) {
            vi block[W];
            for (int j = 0; j < W; j++) {
                block[j] = as_bits(load(sums + (i + j) * kPanel + r) * scales.of_line(line + i + j));
            }
            transpose(block);
            for (int64_t j = 0; j < W && r + j < rows; j++) store(out + (r + j) * pitch + i, as_floats(block[j]));
        }
    }
}

// Slots of a panel of rows, and of what `multiply_run` needs beside one panel or behind more.
constexpr int64_t panel_slots(int64_t inner) { return depth_of<Pairs>(inner) * kPanel; }
constexpr int64_t turned_slots(int64_t rows, int64_t inner) {
    const int64_t panels = (rows + kFewRows - 1) / kFewRows, parts = (inner + kPartNumbers - 1) / kPartNumbers;
    return panels * panel_slots(inner) + (panels > 1 ? parts * kPartSlots : 0);
}

// The lines `first .. first + count` of the matrix by `rows` packed rows: columns of `out`, whose rows are `pitch` apart.
inline void multiply_run(
    const Block& block, const Factor& matrix, int64_t first, int64_t count, int64_t rows, int64_t inner,
    const LineScales& scales, float* out, int64_t pitch) {
    const int64_t panels = (rows + kFewRows - 1) / kFewRows;
    slot* whole = block.right + panels * panel_slots(inner);
    for (int64_t line = first, end = first + count, next; line < end; line = next) {
        next = line + kLines < end ? line + kLines : end;
        if (scales.in_blocks() && next > (line | 127) + 1) next = (line | 127) + 1;
        const int64_t lines = next - line;
        // Of one panel lines are packed as they are multiplied, in the first cache.
        for (int64_t k = 0; panels > 1 && k < inner; k += kPartNumbers) {
            const int64_t numbers = inner - k < kPartNumbers ? inner - k : kPartNumbers;
            pack_lines<Pairs>(matrix, line, lines, k, numbers, whole + k / kPartNumbers * kPartSlots);
        }
        const auto packed = [&](int64_t k, int64_t numbers) -> const slot* {
            if (panels > 1) return whole + k / kPartNumbers * kPartSlots + k % kPartNumbers / Pairs::per_slot;
            pack_lines<Pairs>(matrix, line, lines, k, numbers, block.left);
            return block.left;
        };
        for (int64_t p = 0; p < panels; p++) {
            const int64_t row = p * kFewRows, own = rows - row < kFewRows ? rows - row : kFewRows;
            const slot* panel = block.right + p * panel_slots(inner);
            alignas(64) float sums[kLines * kPanel];
            if (own > W) multiply_lines<true>(packed, line, panel, inner, scales, sums);
            else multiply_lines<false>(packed, line, panel, inner, scales, sums);
            write_turned(sums, line, lines, own, scales, out + row * pitch + line - first, pitch);
        }
    }
}

}  // namespace kpt

#endif
