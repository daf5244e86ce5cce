#include "product.h"

#include "packing.h"
#include "panels.h"
#include "turned.h"

namespace kpt {

namespace {

// `c = left right (scales) [+ c]` for packed blocks; scales of the columns, or null.
template <class Kind>
void multiply_packed(
    const slot* left, int64_t rows, const slot* right, int64_t panel_depth, int64_t columns, int64_t depth, float* c,
    int64_t stride, const float* scales, bool add) {
#if KPT_HAS_TILES
    if constexpr (Kind::step > 1) {
        for (int64_t row = 0; row < rows; row += 2 * Kind::step) {
            const auto run = rows - row > Kind::step ? multiply_tile_rows<true> : multiply_tile_rows<false>;
            run(left + row * kPitch, right, panel_depth, columns, depth, c + row * stride, stride, scales, add);
        }
        return;
    }
#endif
    const int64_t groups = (rows + kTall - 1) / kTall;
    for (int64_t g = 0; g < groups; g++) {
        // Of nearly the same height: a last group of a row or two would wait for loads.
        const int64_t row = rows * g / groups, next = rows * (g + 1) / groups;
        for (int64_t column = 0; column < columns; column += kPanel) {
            multiply_rows<Kind, kTall>(
                static_cast<int>(next - row), left + row * kPitch, right + column * panel_depth, depth,
                c + row * stride + column, stride, scales != nullptr ? scales + column : nullptr, add);
        }
    }
}

// Scales of 8-bit weights that are applied to sums: those of a column, for all of the inner size or for 128 of it.
struct ColumnScales {
    const kpt_matrices* matrices = nullptr;
    int64_t expert = 0;
    // Where the factor's columns are the matrices' N; else its K.
    bool columns_are_n = true;

    float at(int64_t column, int64_t k) const {
        const kpt_matrices& m = *matrices;
        const float* own = m.scale + expert * m.stride_se;
        if (m.scales_of == KPT_SCALES_N) return own[column * m.stride_sn];
        const int64_t along_k = columns_are_n ? k : column, along_n = columns_are_n ? column : k;
        return own[(along_k >> 7) * m.stride_sk + (along_n >> 7) * m.stride_sn];
    }
};

// `numbers` of the inner size from `k` on are packed at a time.
struct Part {
    int64_t k, numbers, depth;
};

template <class Kind>
Part part_of(int64_t inner, int64_t k) {
    const int64_t most = Kind::depth * Kind::per_slot, numbers = inner - k < most ? inner - k : most;
    return {k, numbers, depth_of<Kind>(numbers)};
}

// Add the product of packed blocks to the sums, column scales applied.
template <class Kind>
void add_product(
    const Block& block, int64_t rows, const slot* right, const Part& part, const Columns& columns,
    const ColumnScales& scales) {
    const int64_t width = columns.width();
    if (scales.matrices == nullptr) {
        multiply_packed<Kind>(
            block.left, rows, right, part.depth, width, part.depth, block.sums, columns.pitch(), nullptr, part.k > 0);
        return;
    }
    const int64_t step = scales.matrices->scales_of == KPT_SCALES_BLOCK ? 128 / Kind::per_slot : Kind::depth;
    for (int64_t s = 0; s < part.depth; s += step) {
        float own[kColumns];
        for (int64_t c = 0; c < width; c++) {
            const int64_t place = c % columns.padded();
            const int64_t column = (c < columns.padded() ? columns.first : columns.second) + place;
            own[c] = place < columns.count ? scales.at(column, part.k + s * Kind::per_slot) : 0.0f;
        }
        const int64_t depth = part.depth - s < step ? part.depth - s : step;
        multiply_packed<Kind>(
            block.left + s, rows, right + s * kPanel, part.depth, width, depth, block.sums, columns.pitch(), own,
            part.k + s > 0);
    }
}

template <class Kind>
void pack_columns(const Factor& right, const Columns& columns, const Part& part, slot* out) {
    pack_panels<Kind>(right, columns.first, columns.count, part.k, part.numbers, out);
    if (columns.second >= 0) {
        pack_panels<Kind>(
            right, columns.second, columns.count, part.k, part.numbers, out + columns.padded() * part.depth);
    }
}

// Whether all columns of a right factor are packed at once.
template <class Kind>
bool fits(int64_t inner, int64_t width) {
    return depth_of<Kind>(inner) * width * 4 <= kPackedBytes;
}

// With `scales` the right factor has none of its own.
template <class Kind>
void multiply(
    const Block& block, const Factor& left, int64_t row, int64_t rows, const Factor& right, const Columns& columns,
    int64_t inner, const ColumnScales& scales, const Finish& finish) {
    constexpr int64_t step = Kind::depth * Kind::per_slot;
    [[maybe_unused]] const typename Kind::InUse in_use;
    const int64_t width = columns.width();
    const bool at_once = fits<Kind>(inner, width);
    if (rows == 0) return;
    slot* to = block.right;
    for (int64_t k = 0; at_once && k < inner; k += step) {
        const Part part = part_of<Kind>(inner, k);
        pack_columns<Kind>(right, columns, part, to);
        to += width * part.depth;
    }
    // Blocks of nearly the same height.
    const int64_t blocks = (rows + kRows - 1) / kRows, height = round_up((rows + blocks - 1) / blocks, Kind::step);
    for (int64_t first = row, end = row + rows; first < end; first += height) {
        const int64_t own = end - first < height ? end - first : height;
        if (inner == 0) memset(block.sums, 0, own * columns.pitch() * sizeof(float));
        const slot* from = block.right;
        for (int64_t k = 0; k < inner; k += step) {
            const Part part = part_of<Kind>(inner, k);
            if (!at_once) pack_columns<Kind>(right, columns, part, block.right);
            pack_lines<Kind>(left, first, own, k, part.numbers, block.left);
            add_product<Kind>(block, own, from, part, columns, scales);
            if (at_once) from += width * part.depth;
        }
        finish(first, own, block.sums);
    }
}

#if KPT_HAS_TILES
bool multiplies_turned(const Factor& left, int64_t rows, const Factor& right, int64_t inner) {
    const int64_t most = inner < kLongLines ? kFewRows : kTurnedRows;
    return rows > 0 && rows <= most && left.along && right.along && inner > 0
        && turned_slots(rows, inner) * 4 <= Block::right_bytes(inner);
}

void multiply_turned(
    const Block& block, const Factor& left, int64_t row, int64_t rows, const Factor& right, const Columns& columns,
    int64_t inner, const LineScales& scales, const Finish& finish) {
    const TilesInUse tiles;
    for (int64_t k = 0; k < inner; k += Pairs::depth * Pairs::per_slot) {
        const Part part = part_of<Pairs>(inner, k);
        for (int64_t first = 0; first < rows; first += kFewRows) {
            const int64_t own = rows - first < kFewRows ? rows - first : kFewRows;
            slot* panel = block.right + first / kFewRows * panel_slots(inner);
            pack_panels<Pairs>(left, row + first, own, k, part.numbers, panel + k / Pairs::per_slot * kPanel);
        }
    }
    multiply_run(block, right, columns.first, columns.count, rows, inner, scales, block.sums, columns.pitch());
    if (columns.second >= 0) {
        float* second = block.sums + columns.padded();
        multiply_run(block, right, columns.second, columns.count, rows, inner, scales, second, columns.pitch());
    }
    finish(row, rows, block.sums);
}
#endif

// One expert's matrix as a right factor, with its scales; its columns are N and the inner size K, or the other way round.
KPT_INLINE Factor factor_of_matrix(const kpt_matrices& m, int64_t expert, bool columns_are_n, bool scaled) {
    const int64_t along_inner = columns_are_n ? m.stride_k : m.stride_n;
    const int64_t along_columns = columns_are_n ? m.stride_n : m.stride_k;
    const bool along = along_inner == 1;
    const char* data = static_cast<const char*>(m.data) + expert * m.stride_e * size_of(m.dtype);
    Factor factor{data, along ? along_columns : along_inner, nullptr, m.dtype, along, {}};
    if (scaled && m.scales_of != KPT_SCALES_NONE) {
        const int64_t of_n = m.scales_of == KPT_SCALES_K ? 0 : m.stride_sn;
        const int64_t of_k = m.scales_of == KPT_SCALES_N ? 0 : m.stride_sk;
        const int shift = m.scales_of == KPT_SCALES_BLOCK ? 7 : 0;
        const bool line_is_n = along == columns_are_n;
        factor.scale = {m.scale + expert * m.stride_se, line_is_n ? of_n : of_k, line_is_n ? of_k : of_n, shift, shift};
    }
    return factor;
}

// Whether rows and matrices are multiplied as pairs of bfloat16, exactly but for the sums.
KPT_INLINE bool multiplies_pairs(const Factor& left, const kpt_matrices& m, bool columns_are_n) {
    const bool codes = left.dtype == KPT_FLOAT8_E4M3FN || left.dtype == KPT_FLOAT8_E5M2;
    const bool rows = left.dtype == KPT_BFLOAT16 || (codes && left.scale.data == nullptr);
    const bool fits = m.dtype == KPT_BFLOAT16 || m.dtype == KPT_FLOAT8_E4M3FN || m.dtype == KPT_FLOAT8_E5M2;
    const bool of_columns = m.scales_of == KPT_SCALES_N && columns_are_n;
    const bool applicable = m.scales_of == KPT_SCALES_NONE || m.scales_of == KPT_SCALES_BLOCK || of_columns;
    return KPT_HAS_BF16_DOT && rows && fits && applicable;
}

}  // namespace

void multiply_matrix(
    const Block& block, const Factor& left, int64_t row, int64_t rows, const kpt_matrices& m, int64_t expert,
    bool columns_are_n, const Columns& columns, int64_t inner, const Finish& finish) {
#if KPT_HAS_BF16_DOT
    if (multiplies_pairs(left, m, columns_are_n)) {
        const Factor right = factor_of_matrix(m, expert, columns_are_n, false);
        ColumnScales scales;
        if (m.scales_of != KPT_SCALES_NONE) scales = {&m, expert, columns_are_n};
#if KPT_HAS_TILES
        if (multiplies_turned(left, rows, right, inner)) {
            const LineScales of_lines = scales.matrices != nullptr ? LineScales(m, expert, columns_are_n) : LineScales();
            multiply_turned(block, left, row, rows, right, columns, inner, of_lines, finish);
            return;
        }
#endif
        multiply<Pairs>(block, left, row, rows, right, columns, inner, scales, finish);
        return;
    }
#endif
    const Factor right = factor_of_matrix(m, expert, columns_are_n, true);
    multiply<Singles>(block, left, row, rows, right, columns, inner, {}, finish);
}

void multiply_plain(
    const Block& block, const Factor& left, int64_t row, int64_t rows, const Factor& right, const Columns& columns,
    int64_t inner, const Finish& finish) {
#if KPT_HAS_BF16_DOT
    if (left.dtype == KPT_BFLOAT16 && right.dtype == KPT_BFLOAT16) {
        multiply<Pairs>(block, left, row, rows, right, columns, inner, {}, finish);
        return;
    }
#endif
    multiply<Singles>(block, left, row, rows, right, columns, inner, {}, finish);
}

}  // namespace kpt
