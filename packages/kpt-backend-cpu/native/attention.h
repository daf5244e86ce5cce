// What both directions of attention share: tiles of queries, which keys they see, and their scores.
//
// Scores lie turned: a row is a key, its numbers are queries. Their largest, their sums and the limits of masks then are
// vectors of queries, and K is packed without a transpose. A tile of queries consists of panels, two vectors wide.
#pragma once

#include <float.h>

#include "exponential.h"
#include "packing.h"
#include "panels.h"
#include "scratch.h"
#include "tasks.h"

namespace kpt {

namespace {

// Queries of a tile and keys of a block: those of the mask's blocks.
constexpr int64_t kTileQueries = 128, kBlockKeys = 128;
constexpr int64_t kTilePanels = kTileQueries / kPanel;

// Memory of a thread, handed out piece by piece; of nothing, it counts how much is wanted.
class Room {
public:
    explicit Room(char* base) : base_(base) {}
    template <class T>
    T* take(int64_t count) {
        const int64_t at = size_;
        size_ = round_up(size_ + count * static_cast<int64_t>(sizeof(T)), 64);
        return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
    }
    int64_t size() const { return size_; }

private:
    char* base_;
    int64_t size_ = 0;
};

// So many keys or queries are multiplied at once: spans of keys begin at such a multiple, and are filled up to one.
template <class Kind>
inline constexpr int64_t kAtOnce = Kind::per_slot * Kind::step;

// `c = left right [+ c]` of some rows, filled up to `kAtOnce`, that lie `Row` slots apart; likewise.
template <class Kind, int64_t Row>
void multiply_lines(
    const slot* left, int64_t rows, const slot* right, int64_t panel_depth, int64_t columns, int64_t depth, float* c,
    int64_t stride, bool add);

// Bring slots of panels, [slot][query] and `pitch` apart, into lines of `Row` slots for each of some queries, both filled up.
template <int64_t Row>
void turn(const slot* from, int64_t pitch, int64_t queries, int64_t depth, slot* to) {
    for (int64_t query = 0; query < queries; query += W) {
        for (int64_t s = 0; s < depth; s += W) {
            vi block[W];
            for (int i = 0; i < W; i++) memcpy(&block[i], from + (s + i) * pitch + query, sizeof(vi));
            transpose(block);
            for (int i = 0; i < W; i++) memcpy(to + (query + i) * Row + s, &block[i], sizeof(vi));
        }
    }
}

// `c = left right [+ c]` of some rows and all columns; panels of the right factor are `panel_depth` slots apart.
template <class Kind, int64_t Row, int64_t Depth>
void multiply_block(
    const slot* left, int64_t rows, const slot* right, int64_t panel_depth, int64_t columns, int64_t depth, float* c,
    int64_t stride, bool add) {
    const int64_t groups = (rows + kTall - 1) / kTall;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t row = rows * g / groups, next = rows * (g + 1) / groups;
        for (int64_t column = 0; column < columns; column += kPanel) {
            multiply_rows<Kind, kTall, Row, Depth>(
                static_cast<int>(next - row), left + row * Row, right + column * panel_depth, depth,
                c + row * stride + column, stride, nullptr, add);
        }
    }
}

template <class Kind, int64_t Row>
void multiply_lines(
    const slot* left, int64_t rows, const slot* right, int64_t panel_depth, int64_t columns, int64_t depth, float* c,
    int64_t stride, bool add) {
    if constexpr (Kind::step == 1) {
        multiply_block<Kind, Row, 1>(left, rows, right, panel_depth, columns, depth, c, stride, add);
    }
#if KPT_HAS_TILES
    else {
        for (int64_t row = 0; row < rows; row += 2 * kTile) {
            for (int64_t column = 0; column < columns; column += kPanel) {
                multiply_tiles<true, Row>(
                    left + row * Row, right + column * panel_depth, depth, c + row * stride + column, stride, add);
            }
        }
    }
#endif
}

// The rows of a head as lines of a factor.
KPT_INLINE Factor factor_of(const kpt_heads& x, int64_t batch, int64_t head, bool along) {
    const char* data = static_cast<const char*>(x.data) + (batch * x.stride_b + head * x.stride_h) * size_of(x.dtype);
    return {data, x.stride_t, nullptr, x.dtype, along, {}};
}

template <class T>
KPT_INLINE T* token_of(const kpt_heads& x, int64_t batch, int64_t head, int64_t token) {
    return static_cast<T*>(x.data) + batch * x.stride_b + head * x.stride_h + token * x.stride_t;
}

KPT_INLINE bool any_of(vi mask) {
    int32_t found = 0;
    for (int i = 0; i < W; i++) found |= mask[i];
    return found != 0;
}

// Slots of W numbers each: themselves, or rounded to bfloat16 in pairs.
template <class Kind>
KPT_INLINE vi slots_of(const vf* numbers) {
    if constexpr (Kind::per_slot == 1) {
        return as_bits(numbers[0]);
    }
#if KPT_HAS_BF16_DOT
    else {
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)numbers[1], (__m512)numbers[0]);
        const __m512i order = (__m512i)(vi{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * 0x10001 + (16 << 16));
        return (vi)_mm512_permutexvar_epi16(order, both);
    }
#endif
}

template <class Kind>
KPT_INLINE void store_slots(slot* to, vi slots) {
    memcpy(to, &slots, sizeof slots);
}

// Whether NaN or infinity is among packed numbers.
template <class Kind>
bool any_wild(const slot* slots, int64_t count) {
    vi found = {};
    for (int64_t i = 0; i < count; i += W) {
        vi bits;
        memcpy(&bits, slots + i, sizeof bits);
        found |= (bits & 0x7f800000) == 0x7f800000;
        if constexpr (Kind::per_slot == 2) found |= (bits & 0x7f80) == 0x7f80;
    }
    return any_of(found);
}

// Zero a line along the inner size of packed panels.
template <class Kind>
void zero_line(slot* panels, int64_t panel_depth, int64_t columns, int64_t line) {
    const slot kept = Kind::per_slot == 1 ? 0 : line % 2 == 0 ? 0xffff0000u : 0xffffu;
    for (int64_t column = 0; column < columns; column += kPanel) {
        slot* own = panels + column * panel_depth + line / Kind::per_slot * kPanel;
        for (int64_t i = 0; i < kPanel; i++) own[i] &= kept;
    }
}

enum State : uint8_t { kDead, kPartial, kFull };

// Some keys, or blocks of them.
struct Span {
    int64_t begin, end;
};

// Which keys the queries of a tile see.
class Mask {
public:
    Mask(const kpt_attention& p, Room& room)
        : p_(p), count_(p.intervals != nullptr ? p.interval_count : 1), blocks_((p.keys + kBlockKeys - 1) / kBlockKeys),
          begins_(room.take<int32_t>(count_ * kTileQueries)), sizes_(room.take<int32_t>(count_ * kTileQueries)),
          states_(room.take<uint8_t>(blocks_ * kTilePanels)) {}

    // The blocks that some query of the tile may see lie from the first to before the second.
    Span blocks() const { return live_; }
    State state(int64_t block, int64_t panel) const { return static_cast<State>(states_[block * kTilePanels + panel]); }

    // Whether a query has an interval that is not empty.
    bool sees(int64_t query) const {
        int32_t all = 0;
        for (int64_t i = 0; i < count_; i++) all |= sizes_[i * kTileQueries + query];
        return all != 0;
    }

    // Look at the queries of a head from `first` on.
    void look(int64_t batch, int64_t head, int64_t first) {
        live_ = {p_.keys, 0};
        for (int64_t q = 0; q < kTileQueries; q++) look_at_query(batch, head, first + q, q);
        live_ = {live_.begin / kBlockKeys, (live_.end + kBlockKeys - 1) / kBlockKeys};
        if (p_.blocks != nullptr) {
            table_ = p_.blocks + batch * p_.blocks_stride_b + head * p_.blocks_stride_h + first / kTileQueries * blocks_;
        }
        for (int64_t block = live_.begin; block < live_.end; block++) {
            for (int64_t panel = 0; panel < kTilePanels; panel++) {
                states_[block * kTilePanels + panel] = find_state(block, panel);
            }
        }
    }

    // The keys of a block from the first to the last that some query of a panel may see.
    Span span(int64_t block, int64_t panel) const {
        const int32_t from = static_cast<int32_t>(block * kBlockKeys), to = end_of(block);
        vi least = splat_int(to), most = splat_int(from);
        for (int half = 0; half < 2; half++) {
            for (int64_t i = 0; i < count_; i++) {
                const vi begin = begins(i, panel, half), end = begin + sizes(i, panel, half);
                const vi low = begin > from ? begin : splat_int(from), high = end < to ? end : splat_int(to);
                const vi live = low < high;
                least = (live & (low < least)) ? low : least;
                most = (live & (high > most)) ? high : most;
            }
        }
        Span found{to, from};
        for (int i = 0; i < W; i++) {
            if (least[i] < found.begin) found.begin = least[i];
            if (most[i] > found.end) found.end = most[i];
        }
        return {found.begin - from, found.end - from};
    }

    int32_t end_of(int64_t block) const {
        const int64_t end = (block + 1) * kBlockKeys;
        return static_cast<int32_t>(end < p_.keys ? end : p_.keys);
    }

    // Call `body(key, first, second)` for the keys of a span, with which queries of both vectors of a panel see each.
    template <class Body>
    KPT_INLINE void each_key(const Mask& m, int64_t block, int64_t panel, Span span, Body&& body) {
        vi words[2][4];
        const bool has_bits = m.table_ != nullptr && m.table_[block] >= 2;
        if (has_bits) {
            const uint8_t* bits = m.p_.block_bits + (m.table_[block] - 2) * (kTileQueries * kBlockKeys / 8);
            for (int64_t lane = 0; lane < kPanel; lane++) {
                int32_t own[4];
                memcpy(own, bits + (panel * kPanel + lane) * sizeof own, sizeof own);
                for (int word = 0; word < 4; word++) words[lane / W][word][lane % W] = own[word];
            }
        }
        for (int64_t key = span.begin; key < span.end; key++) {
            const int32_t at = static_cast<int32_t>(block * kBlockKeys + key);
            vi seen[2] = {};
            for (int64_t i = 0; i < m.count_; i++) {
                for (int half = 0; half < 2; half++) {
                    seen[half] |= (vi)((vu)(at - m.begins(i, panel, half)) < (vu)m.sizes(i, panel, half));
                }
            }
            if (has_bits) {
                for (int half = 0; half < 2; half++) {
                    const vi word = words[half][key / 32];
                    seen[half] &= -((word >> static_cast<int>(key % 32)) & 1);
                }
            }
            body(key, seen[0], seen[1]);
        }
    }

    // Zero the lines of packed panels, of this block's keys, that no query of the tile sees.
    template <class Kind>
    void zero_unseen(int64_t block, slot* panels, int64_t panel_depth, int64_t columns) const {
        bool seen[kBlockKeys] = {};
        for (int64_t panel = 0; panel < kTilePanels; panel++) {
            if (state(block, panel) == kFull) return;
            if (state(block, panel) == kDead) continue;
            each_key(*this, block, panel, span(block, panel), [&](int64_t key, vi first, vi second) {
                seen[key] |= any_of(first | second);
            });
        }
        const int64_t keys = end_of(block) - block * kBlockKeys;
        for (int64_t key = 0; key < keys; key++) {
            if (!seen[key]) zero_line<Kind>(panels, panel_depth, columns, key);
        }
    }

private:
    vi begins(int64_t i, int64_t panel, int half) const { return vector(begins_, i, panel, half); }
    vi sizes(int64_t i, int64_t panel, int half) const { return vector(sizes_, i, panel, half); }
    static vi vector(const int32_t* from, int64_t i, int64_t panel, int half) {
        vi out;
        memcpy(&out, from + i * kTileQueries + panel * kPanel + half * W, sizeof out);
        return out;
    }

    void look_at_query(int64_t batch, int64_t head, int64_t query, int64_t q) {
        int64_t limit = p_.keys;
        if (query >= p_.queries) limit = 0;
        else if (p_.causal && query + p_.position + 1 < limit) limit = query + p_.position + 1;
        const int32_t* given = nullptr;
        if (p_.intervals != nullptr && query < p_.queries) {
            given = p_.intervals + batch * p_.intervals_stride_b + head * p_.intervals_stride_h + query * count_ * 2;
        }
        for (int64_t i = 0; i < count_; i++) {
            int64_t begin = 0, end = limit;
            if (given != nullptr) {
                begin = given[2 * i] > 0 ? given[2 * i] : 0;
                end = given[2 * i + 1] < limit ? given[2 * i + 1] : limit;
            }
            if (begin < end && begin < live_.begin) live_.begin = begin;
            if (begin < end && end > live_.end) live_.end = end;
            begins_[i * kTileQueries + q] = static_cast<int32_t>(begin < end ? begin : 0);
            sizes_[i * kTileQueries + q] = static_cast<int32_t>(begin < end ? end - begin : 0);
        }
    }

    State find_state(int64_t block, int64_t panel) const {
        if (table_ != nullptr && table_[block] == 0) return kDead;
        const int32_t from = static_cast<int32_t>(block * kBlockKeys), to = end_of(block);
        vi live = {}, full = splat_int(-1);
        for (int half = 0; half < 2; half++) {
            vi covered = {};
            for (int64_t i = 0; i < count_; i++) {
                const vi begin = begins(i, panel, half), size = sizes(i, panel, half), end = begin + size;
                live |= (begin < to) & (end > from) & (size > 0);
                covered |= (begin <= from) & (end >= to);
            }
            full &= covered;
        }
        if (!any_of(live)) return kDead;
        return any_of(~full) || (table_ != nullptr && table_[block] != 1) ? kPartial : kFull;
    }

    const kpt_attention& p_;
    int64_t count_, blocks_;
    int32_t *begins_, *sizes_;
    uint8_t* states_;
    const int32_t* table_ = nullptr;
    Span live_{0, 0};
};

// What is added to the scores of a panel against the keys of a block.
class Added {
public:
    Added(const kpt_attention& p, Room& room)
        : p_(p), far_(p.slopes != nullptr || p.by_distance != nullptr),
          bias_(room.take<float>(p.bias.data != nullptr ? kBlockKeys * kPanel : 0)),
          by_step_(room.take<float>(far_ ? kBlockKeys + kPanel : 0)) {}

    bool any() const { return far_ || p_.bias.data != nullptr; }

    // The queries of a head from `first` on.
    void look(int64_t batch, int64_t head, int64_t first) {
        batch_ = batch;
        head_ = head;
        first_ = first;
    }

    // Bring it into the order of the scores.
    void prepare(int64_t block, int64_t panel, int64_t keys) const {
        const int64_t query = first_ + panel * kPanel, key = block * kBlockKeys;
        if (p_.bias.data != nullptr) {
            const int64_t rows = p_.queries - query < kPanel ? p_.queries - query : kPanel;
            pack_panels<Singles>(
                factor_of(p_.bias, batch_, head_, true), query, rows, key, keys, reinterpret_cast<slot*>(bias_));
        }
        // A step is a query's number less a key's: of neighbouring queries they lie side by side.
        for (int64_t step = 0; far_ && step < kBlockKeys + kPanel - 1; step++) {
            const int64_t distance = key - query - p_.position - (step - (kBlockKeys - 1));
            float sum = 0.0f;
            if (p_.slopes != nullptr) sum -= p_.slopes[head_] * static_cast<float>(distance < 0 ? -distance : distance);
            if (p_.by_distance != nullptr) {
                const int64_t most = p_.far, at = distance < -most ? -most : distance > most ? most : distance;
                sum += p_.by_distance[head_ * (2 * most + 1) + most + at];
            }
            by_step_[step] = sum;
        }
    }

    // A vector of scores with it.
    KPT_INLINE vf with(const Added& a, vf score, int64_t key, int half) {
        if (a.far_) score += load(a.by_step_ + (kBlockKeys - 1) - key + half * W);
        if (a.p_.bias.data != nullptr) score += load(a.bias_ + key * kPanel + half * W);
        return score;
    }

private:
    const kpt_attention& p_;
    const bool far_;
    float *bias_, *by_step_;
    int64_t batch_ = 0, head_ = 0, first_ = 0;
};

// Which weights dropout keeps: numbers of the place alone, so that a backward draws the same (SplitMix64 of a counter).
class Dropout {
public:
    Dropout(const kpt_attention& p, Room& room) : p_(p), rows_(room.take<uint64_t>(any() ? kTileQueries : 0)) {}

    bool any() const { return p_.drop_scale > 0.0f; }

    void look(int64_t batch, int64_t head, int64_t first) {
        uint64_t start = static_cast<uint64_t>(p_.seed) * kIncrement + static_cast<uint64_t>(p_.offset);
        mix(start);
        const uint64_t row = static_cast<uint64_t>(p_.first_row + (batch * p_.heads + head) * p_.queries + first);
        for (uint64_t q = 0; any() && q < kTileQueries; q++) mix(rows_[q] = start + (row + q) * kIncrement);
    }

    // Of W queries of the tile from `query` on, what each has of a weight of `key`, any of the call's.
    KPT_INLINE vf kept(const Dropout& d, vf value, int64_t query, int64_t key) {
        wide drawn;
        memcpy(&drawn, d.rows_ + query, sizeof drawn);
        drawn += static_cast<uint64_t>(key) * kIncrement;
        mix(drawn);
        const vi yes = __builtin_convertvector(drawn >> 40 >= static_cast<uint64_t>(d.p_.drop_least), vi);
        return select(yes, value, vf{});
    }

private:
    typedef uint64_t wide __attribute__((vector_size(W * 8)));
    static constexpr uint64_t kIncrement = 0x9e3779b97f4a7c15;
    template <class T>
    KPT_INLINE void mix(T& x) {
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
        x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
        x ^= x >> 31;
    }

    const kpt_attention& p_;
    uint64_t* rows_;
};

// Capped and scaled scores of a panel against the keys of a span, in place of products, with what is added: -inf where a
// query does not see a key. `most` becomes the largest of each query.
template <class Add, class Body>
KPT_INLINE void with_scores(const kpt_attention& p, float* scores, vf* most, int64_t key, Add&& add, Body&& masked) {
    for (int half = 0; half < 2; half++) {
        float* at = scores + key * kPanel + half * W;
        // Stored before anything is taken off, so that it is rounded as the largest one is.
        vf score = load(at) * p.scale;
        if (p.softcap > 0.0f) score = tanh(score / p.softcap) * p.softcap;
        score = masked(half, add(score, key, half));
        most[half] = larger(most[half], score);
        store(at, score);
    }
}

template <class Add>
KPT_INLINE void finish_added_scores(
    const kpt_attention& p, const Mask& mask, int64_t block, int64_t panel, Span span, float* scores, vf* most, Add&& add) {
    if (mask.state(block, panel) == kFull) {
        for (int64_t key = span.begin; key < span.end; key++) {
            with_scores(p, scores, most, key, add, [](int, vf score) { return score; });
        }
        return;
    }
    Mask::each_key(mask, block, panel, span, [&](int64_t key, vi first, vi second) {
        with_scores(p, scores, most, key, add, [&](int half, vf score) {
            return select(half == 0 ? first : second, score, splat(-__builtin_inff()));
        });
    });
}

KPT_INLINE void finish_scores(
    const kpt_attention& p, const Mask& mask, const Added& added, int64_t block, int64_t panel, Span span, float* scores,
    vf* most) {
    if (!added.any()) {
        const auto none = [](vf score, int64_t, int) { return score; };
        return finish_added_scores(p, mask, block, panel, span, scores, most, none);
    }
    added.prepare(block, panel, mask.end_of(block) - block * kBlockKeys);
    finish_added_scores(p, mask, block, panel, span, scores, most, [&](vf score, int64_t key, int half) {
        return Added::with(added, score, key, half);
    });
}

// The keys of a panel's span, from a whole slot on.
template <class Kind>
KPT_INLINE Span span_of(const Mask& mask, int64_t block, int64_t panel) {
    if (mask.state(block, panel) == kFull) return {0, mask.end_of(block) - block * kBlockKeys};
    Span span = mask.span(block, panel);
    span.begin -= span.begin % kAtOnce<Kind>;
    return span;
}

constexpr float kLowest = -FLT_MAX;

template <class Body>
int with_kind(int dtype, Body&& body) {
#if KPT_HAS_BF16_DOT
    if (dtype == KPT_BFLOAT16) return body(Pairs{});
#endif
    (void)dtype;
    return body(Singles{});
}

}  // namespace

}  // namespace kpt
