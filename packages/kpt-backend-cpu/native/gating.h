// Finding the highest of many numbers: what gating chooses experts and groups with.
#pragma once

#include <float.h>

#include "simd.h"

namespace kpt {

// Numbers to choose from come in blocks, one bit of a word for each.
constexpr int block_size = 64;
constexpr int block_rows = block_size / W;

KPT_INLINE int64_t blocks_of(int64_t count) { return (count + block_size - 1) / block_size; }

// What is below everything that can be chosen.
constexpr float removed = -__builtin_inff();

// By what `x` is chosen: NaN before all else, as in torch.topk; -infinity stays above `removed`.
KPT_INLINE vf key_of(vf x) {
    const vf finite = larger(splat(-FLT_MAX), smaller(splat(FLT_MAX), x));
    return select(x != x, splat(__builtin_inff()), finite);
}

KPT_INLINE vi lane_numbers() {
    vi out;
    for (int i = 0; i < W; i++) out[i] = i;
    return out;
}

// The largest lane, in every lane.
KPT_INLINE vf largest(vf x) {
#if defined(__AVX512F__)
    x = larger(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    x = larger(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    x = larger(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    return larger(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#elif defined(__AVX2__)
    x = larger(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
    x = larger(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5));
    return larger(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6));
#else
    x = larger(x, __builtin_shufflevector(x, x, 2, 3, 0, 1));
    return larger(x, __builtin_shufflevector(x, x, 1, 0, 3, 2));
#endif
}

// Bit i is set where a[i] == b[i].
KPT_INLINE uint32_t equal_lanes(vf a, vf b) {
#if defined(__AVX512F__)
    uint32_t bits = _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ);
    // GCC 12 may widen the mask to 64 bits by storing 16 and loading 64; from a general register it does not.
    __asm__("" : "+r"(bits));
    return bits;
#elif defined(__AVX2__)
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_EQ_OQ));
#elif defined(__x86_64__)
    return _mm_movemask_ps(_mm_cmpeq_ps((__m128)a, (__m128)b));
#else
    const vi mask = a == b;
    uint32_t bits = 0;
    for (int i = 0; i < W; i++) bits |= (mask[i] & 1u) << i;
    return bits;
#endif
}

// The largest of each lane.
KPT_INLINE vf highest(const vf (&rows)[block_rows]) {
    vf out[block_rows / 2];
    for (int r = 0; r < block_rows / 2; r++) out[r] = larger(rows[r], rows[r + block_rows / 2]);
    for (int half = block_rows / 4; half > 0; half /= 2) {
        for (int r = 0; r < half; r++) out[r] = larger(out[r], out[r + half]);
    }
    return out[0];
}

// Remove what equals `best` from a block: its bits.
KPT_INLINE uint64_t take(vf (&rows)[block_rows], vf best) {
    uint64_t bits = 0;
    for (int r = 0; r < block_rows; r++) {
        bits |= uint64_t{equal_lanes(rows[r], best)} << (r * W);
        rows[r] = select(rows[r] == best, splat(removed), rows[r]);
    }
    return bits;
}

// Append the numbers of the set bits while there is room, lowest first.
KPT_INLINE int64_t append(uint64_t bits, int64_t first, int64_t* out, int64_t size, int64_t room) {
    for (; bits != 0 && size < room; bits &= bits - 1) out[size++] = first + __builtin_ctzll(bits);
    return size;
}

KPT_INLINE void load_block(const float* keys, vf (&rows)[block_rows]) {
    for (int r = 0; r < block_rows; r++) rows[r] = load(keys + r * W);
}

// Write where the `count` highest keys are, highest first, the lower place first of equal ones. The keys fill whole
// blocks, `removed` after the last one; they are destroyed. `maxima` is room for a vector of each block.
KPT_INLINE void choose_highest(float* keys, int64_t blocks, vf* maxima, int64_t count, int64_t* out) {
    vf rows[block_rows];
    int64_t found = 0;
    if (blocks == 1) {
        load_block(keys, rows);
        while (found < count) found = append(take(rows, largest(highest(rows))), 0, out, found, count);
        return;
    }
    for (int64_t b = 0; b < blocks; b++) {
        load_block(keys + b * block_size, rows);
        maxima[b] = highest(rows);
    }
    while (found < count) {
        vf best = maxima[0];
        for (int64_t b = 1; b < blocks; b++) best = larger(best, maxima[b]);
        best = largest(best);
        for (int64_t begin = 0; begin < blocks; begin += 64) {
            // Which blocks, in bits: a branch for each of them would be guessed wrong.
            uint64_t with_best = 0;
            for (int64_t b = begin; b < blocks && b < begin + 64; b++) {
                with_best |= uint64_t{equal_lanes(maxima[b], best) != 0} << (b - begin);
            }
            for (; with_best != 0; with_best &= with_best - 1) {
                const int64_t b = begin + __builtin_ctzll(with_best);
                float* const block = keys + b * block_size;
                load_block(block, rows);
                found = append(take(rows, best), b * block_size, out, found, count);
                maxima[b] = highest(rows);
                for (int r = 0; r < block_rows; r++) store(block + r * W, rows[r]);
            }
        }
    }
}

}  // namespace kpt
