// Products of packed pairs of bfloat16 by AMX, whose registers are tiles of 16 rows of 16 slots.
#pragma once

#include "product.h"

#if KPT_HAS_TILES

namespace kpt {

constexpr int kTile = 16;

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
// Not on the stack: GCC 12 is not told that all of it is read.
inline constexpr TileConfig whole_tiles;

// While it lives, this thread's eight tiles have their full size. Left configured they would cost every switch of threads.
class TilesInUse {
public:
    TilesInUse() { _tile_loadconfig(&whole_tiles); }
    ~TilesInUse() { _tile_release(); }
    TilesInUse(const TilesInUse&) = delete;
    TilesInUse& operator=(const TilesInUse&) = delete;
};

// `c = left right [+ c]` for 16 rows, or 32 (kTwo), and a panel of columns. Rows stay in the first cache, which panels
// and sums are loaded past.
template <bool kTwo, int64_t Row = kPitch>
void multiply_tiles(const slot* left, const slot* right, int64_t depth, float* c, int64_t stride, bool add) {
    constexpr int64_t left_pitch = Row * 4, right_pitch = kPanel * 4;
    const int64_t pitch = stride * 4;
    float* lower = c + kTile * stride;
    asm volatile("" ::: "memory");  // the intrinsics do not say that they read memory
    if (add) {
        _tile_stream_loadd(0, c, pitch);
        _tile_stream_loadd(1, c + W, pitch);
        if constexpr (kTwo) {
            _tile_stream_loadd(2, lower, pitch);
            _tile_stream_loadd(3, lower + W, pitch);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (kTwo) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    for (int64_t s = 0; s < depth; s += kTile) {
        _tile_stream_loadd(6, right + s * kPanel, right_pitch);
        _tile_stream_loadd(7, right + s * kPanel + W, right_pitch);
        _tile_loadd(4, left + s, left_pitch);
        if constexpr (kTwo) _tile_loadd(5, left + kTile * Row + s, left_pitch);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (kTwo) {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, pitch);
    _tile_stored(1, c + W, pitch);
    if constexpr (kTwo) {
        _tile_stored(2, lower, pitch);
        _tile_stored(3, lower + W, pitch);
    }
    asm volatile("" ::: "memory");
}

// Such a product of all columns, scales of theirs applied unless there are none.
template <bool kTwo>
void multiply_tile_rows(
    const slot* left, const slot* right, int64_t panel_depth, int64_t columns, int64_t depth, float* c, int64_t stride,
    const float* scales, bool add) {
    constexpr int rows = kTwo ? 2 * kTile : kTile;
    for (int64_t column = 0; column < columns; column += kPanel) {
        const slot* panel = right + column * panel_depth;
        if (scales == nullptr) {
            multiply_tiles<kTwo>(left, panel, depth, c + column, stride, add);
            continue;
        }
        alignas(64) float sums[rows * kPanel];
        multiply_tiles<kTwo>(left, panel, depth, sums, kPanel, false);
        for (int i = 0; i < rows; i++) {
            for (int half = 0; half < kPanel; half += W) {
                float* p = c + i * stride + column + half;
                const vf value = load(sums + i * kPanel + half) * load(scales + column + half);
                store(p, add ? load(p) + value : value);
            }
        }
    }
}

}  // namespace kpt

#endif
