// Products of blocks: everything in this library that multiplies many rows goes through here.
//
// A task is some columns of the result for many rows. It packs its columns of the right factor once, over the whole inner
// size; then, for a block of rows after the other, the left factor's, and multiplies. What is multiplied most, the sums and
// packed rows, stays in the second cache, and packed columns stream through it from the third, which costs nothing beside the
// arithmetic. Tasks share nothing.
#pragma once

#include "factor.h"

namespace kpt {

constexpr int kPanel = 2 * W;
// The most slots along the inner size that are packed at a time: a few rows of them stay in the first cache.
constexpr int kDepth = 256;
// The distance of rows: not a power of two, since those share a set of the cache.
constexpr int kPitch = kDepth + 16;

typedef uint32_t slot;

// Rows whose sums a task has at a time, the most that it computes, and the most columns. Each such block of rows reads all
// packed columns, for tiles nearly at the rate of the third cache.
constexpr int64_t kRows = KPT_HAS_TILES ? 256 : 126;
constexpr int64_t kTaskRows = 8 * kRows;
constexpr int64_t kColumns = 512;
// Behind each row of sums, so that the 16 of a tile do not share a set of the first cache.
constexpr int64_t kSumsGap = KPT_HAS_TILES ? W : 0;

constexpr int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Packed columns are to stay in a core's part of the third cache.
constexpr int64_t kPackedBytes = int64_t{1} << 23;

// So many columns of a right factor are packed at a time. Where too few would fit, all are taken, and packed again for each
// block of rows.
constexpr int64_t columns_at_once(int64_t inner) {
    const int64_t fitting = kPackedBytes / 4 / (inner > 0 ? inner : 1) / (2 * kPanel) * (2 * kPanel);
    return fitting < kColumns / 4 || fitting > kColumns ? kColumns : fitting;
}

// What a thread packs and sums in.
struct Block {
    slot* left;
    float* sums;
    slot* right;

    static constexpr int64_t left_bytes = (kRows + W) * kPitch * 4;
    static constexpr int64_t sums_bytes = kRows * (kColumns + kSumsGap) * 4;

    static constexpr int64_t right_bytes(int64_t inner) {
        // Slots of pairs are half as many as numbers, and filled up to whole tiles.
        const int64_t all = kColumns * round_up(inner, 32) * 4;
        return all < kPackedBytes ? all : kPackedBytes;
    }
    // Room for products of such an inner size, or a smaller one.
    static constexpr int64_t bytes(int64_t inner) {
        return round_up(left_bytes + sums_bytes + right_bytes(inner), 4096);
    }
    // That of a thread, where `memory` has `size` bytes for each.
    static Block at(void* memory, int64_t size, int rank) {
        char* p = static_cast<char*>(memory) + rank * size;
        return {reinterpret_cast<slot*>(p), reinterpret_cast<float*>(p + left_bytes),
                reinterpret_cast<slot*>(p + left_bytes + sums_bytes)};
    }
};

// Columns of a right factor that a task computes: one run, or two of the same length (gate and up), which lie behind one
// another in the sums, the second at `round_up(columns, kPanel)`.
struct Columns {
    int64_t first, count;
    int64_t second = -1;

    int64_t padded() const { return round_up(count, kPanel); }
    int64_t width() const { return padded() * (second >= 0 ? 2 : 1); }
    // The distance of rows of sums.
    int64_t pitch() const { return width() + kSumsGap; }
};

// What is done with the sums of rows `first .. first + rows` of the left factor, `columns.width()` of them in a row, rows
// `columns.pitch()` apart.
class Finish {
public:
    template <class Body>
    Finish(const Body& body)
        : body_(&body), call_([](const void* own, int64_t first, int64_t rows, const float* sums) {
              (*static_cast<const Body*>(own))(first, rows, sums);
          }) {}
    void operator()(int64_t first, int64_t rows, const float* sums) const { call_(body_, first, rows, sums); }

private:
    const void* body_;
    void (*call_)(const void*, int64_t, int64_t, const float*);
};

// Multiply rows `row .. row + rows` of `left` by `columns` of an expert's matrix, over the whole inner size. The columns are
// the matrix's N and the inner size its K, or the other way round.
void multiply_matrix(
    const Block& block, const Factor& left, int64_t row, int64_t rows, const kpt_matrices& m, int64_t expert,
    bool columns_are_n, const Columns& columns, int64_t inner, const Finish& finish);

// The same with any right factor of the left one's dtype.
void multiply_plain(
    const Block& block, const Factor& left, int64_t row, int64_t rows, const Factor& right, const Columns& columns,
    int64_t inner, const Finish& finish);

}  // namespace kpt
