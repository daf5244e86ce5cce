// Few queries of many keys: each task goes once through some keys of one sequence, with all its queries, of one head or, if
// the heads of a key lie together, of all. What limits it is reading the keys and values, so rows of four queries share
// what is loaded, and what comes next is prefetched.
#include <float.h>

#include <type_traits>

#include "dot_formats.h"
#include "exponential.h"
#include "parallel.h"
#include "scratch.h"

using namespace kpt;

namespace {

// Keys whose scores are computed before their values are read, and keys of a task: a fixed number, so that results
// depend neither on the other sequences nor on the threads.
constexpr int64_t kChunk = 64, kSplit = 512;
constexpr int kRows = 4;
// Fewer products than this take less time than waking a thread.
constexpr int64_t kAlone = 1 << 17;
// Rows that are read at once where they are far apart: often that is a power of two, and a cache of 8 ways holds 8.
constexpr int64_t kTogether = 8, kFar = 1024;
// How many keys ahead one is fetched.
constexpr int64_t kAhead = 8;

struct Part {
    int64_t sequence, head, heads, begin, end;
};

// The keys that a query sees.
struct Seen {
    int32_t begin, end;
};

// Keys of a sequence, in how many parts of a head they are read, rows of a head, and what comes before them.
struct Sequence {
    int64_t begin, end, splits, rows, first_part, first_row;
};

// Into the second cache: the first has no room for what is read between.
template <class T>
KPT_INLINE void fetch(const T* from, int64_t count) {
    const char* at = reinterpret_cast<const char*>(from);
    for (int64_t i = 0; i < count * static_cast<int64_t>(sizeof(T)); i += 64) __builtin_prefetch(at + i, 0, 2);
}

// Values of 8 bits are added as they widen fastest: in so many of a unit.
template <class T>
inline constexpr float unit = 1.0f;
template <>
inline constexpr float unit<e4m3> = 256.0f;
template <class T>
KPT_INLINE vf in_units(const T* p) { return load(p); }
KPT_INLINE vf in_units(const e4m3* p) { return load_256th(p); }

// Two vectors of values in units. Those of bfloat16 are the even ones and the odd ones, which takes half the instructions.
template <class T>
KPT_INLINE void get_two(const T* from, vf* to) {
    to[0] = in_units(from);
    to[1] = in_units(from + W);
}
KPT_INLINE void get_two(const bfloat16* from, vf* to) {
    vi both;
    memcpy(&both, from, sizeof both);
    to[0] = as_floats(both << 16);
    to[1] = as_floats(both & static_cast<int32_t>(0xffff0000));
}

// Put two vectors in the order of the values, of which `get_two` made them.
template <class T>
KPT_INLINE void order_two(vf* sums) {
    if constexpr (std::is_same_v<T, bfloat16>) {
        const vf even = sums[0], odd = sums[1];
#if defined(__AVX512F__)
        const vi low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
        sums[0] = (vf)_mm512_permutex2var_ps((__m512)even, (__m512i)low, (__m512)odd);
        sums[1] = (vf)_mm512_permutex2var_ps((__m512)even, (__m512i)(low + 8), (__m512)odd);
#elif defined(__AVX2__)
        const __m256 low = _mm256_unpacklo_ps((__m256)even, (__m256)odd), high = _mm256_unpackhi_ps((__m256)even, (__m256)odd);
        sums[0] = (vf)_mm256_permute2f128_ps(low, high, 0x20);
        sums[1] = (vf)_mm256_permute2f128_ps(low, high, 0x31);
#else
        for (int i = 0; i < 2 * W; i++) sums[i / W][i % W] = i % 2 == 0 ? even[i / 2] : odd[i / 2];
#endif
    }
}

KPT_INLINE float largest_of(vf value) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)value);
#else
    float most = value[0];
    for (int i = 1; i < W; i++) most = value[i] > most ? value[i] : most;
    return most;
#endif
}

class Kernel {
public:
    explicit Kernel(const struct kpt_attention_paged& p)
        : p_(p), groups_(p.heads / p.kv_heads), staging_(staging_of(p)), value_pitch_(round_up(p.value_dim)),
          per_row_(value_pitch_ + 2) {}

    int run() {
        Layout own, whole;
        const auto sequences = whole.add<Sequence>(p_.sequences);
        const Scratch known(whole.size());
        if (known.get() == nullptr) return KPT_NO_MEMORY;
        sequences_ = sequences.in(known);
        int64_t parts = 0, most_rows = 0, all_rows = 0, work = 0;
        bool whole_each = true;  // each sequence is one part, which writes the result itself
        for (int64_t s = 0; s < p_.sequences; s++) {
            Sequence& one = sequences_[s];
            one = look_at(s);
            one.first_part = parts;
            one.first_row = all_rows;
            parts += one.splits * p_.kv_heads;
            all_rows += one.splits * p_.kv_heads * one.rows;
            if (one.splits > 0 && one.rows > most_rows) most_rows = one.rows;
            whole_each = whole_each && one.splits == 1;
            work += (one.end - one.begin) * one.rows * p_.kv_heads * (p_.dim + p_.value_dim);
        }
        most_rows = (most_rows + kRows - 1) / kRows * kRows;
        const int wanted = work < kAlone ? 1 : p_.threads;
        int64_t heads = p_.k.stride_head < p_.k.stride_token ? p_.kv_heads : 1;
        // Reading memory in its order is worth less than a thread that has nothing to do.
        while (heads > 1 && parts / heads < 4 * wanted && wanted > 1) {
            do heads--;
            while (p_.kv_heads % heads != 0);
        }
        const auto q = own.add<char>(most_rows * heads * staging_.bytes());
        const auto query = own.add<float>(p_.dim);
        const auto scores = own.add<float>(most_rows * heads * kChunk);
        const int64_t own_size = own.size();
        Layout layout;
        parts /= heads;
        const int threads = parts < wanted ? static_cast<int>(parts > 0 ? parts : 1) : wanted;
        const auto of_threads = layout.add<char>(own_size * threads);
        const auto partial = layout.add<float>(all_rows * per_row_);
        const Scratch space(layout.size());
        if (space.get() == nullptr) return KPT_NO_MEMORY;
        float* results = partial.in(space);
        Tasks reading, merging;
        parallel(threads, [&](int rank) {
            char* mine = of_threads.in(space) + rank * own_size;
            float* mine_query = reinterpret_cast<float*>(mine + query.at);
            float* mine_scores = reinterpret_cast<float*>(mine + scores.at);
            reading.all(parts, [&](int64_t task) {
                int64_t low = 0, high = p_.sequences - 1;  // the last whose parts begin at the task or before it
                while (low < high) {
                    const int64_t middle = (low + high + 1) / 2;
                    if (sequences_[middle].first_part <= task * heads) low = middle;
                    else high = middle - 1;
                }
                const Sequence& one = sequences_[low];
                const int64_t number = task - one.first_part / heads, split = number % one.splits;
                const int64_t begin = one.begin + split * kSplit, head = number / one.splits * heads;
                const Part part{low, head, heads, begin, begin + kSplit < one.end ? begin + kSplit : one.end};
                // Of each head the splits lie together.
                float* result = results + (one.first_row + (head * one.splits + split) * one.rows) * per_row_;
                const int64_t step = one.splits * one.rows * per_row_;
                with_type(p_.k.dtype, [&](auto kind) {
                    using T = decltype(kind);
                    prepare(part, one.rows, mine + q.at, mine_query, result, step);
                    attend<T>(part, one.rows, mine + q.at, mine_scores, result, step);
                });
                for (int64_t h = 0; whole_each && h < heads; h++) merge(low, head + h, one.rows, result + h * step, 1);
            });
            if (whole_each) return;
            merging.all(p_.sequences * p_.kv_heads, [&](int64_t task) {
                const Sequence& one = sequences_[task / p_.kv_heads];
                const int64_t head = task % p_.kv_heads, first = one.first_row + head * one.splits * one.rows;
                merge(task / p_.kv_heads, head, one.rows, results + first * per_row_, one.splits);
            });
        });
        return KPT_OK;
    }

private:
    static int64_t round_up(int64_t size) { return (size + W - 1) / W * W; }

    // Queries of bfloat16 multiply keys as bfloat16, exactly, where there is an instruction for that.
    static Staging staging_of(const struct kpt_attention_paged& p) {
        const bool small = size_of(p.k.dtype) == 1;
        const bool bf16 = KPT_HAS_BF16_DOT && p.q.dtype == KPT_BFLOAT16 && (small || p.k.dtype == KPT_BFLOAT16);
        return Staging{bf16, bf16 && small, p.dim};
    }

    // How many tokens come before those of a sequence.
    int64_t before(int64_t s) const { return p_.ends != nullptr ? p_.ends[s] : s * p_.queries; }

    int64_t queries_of(int64_t s) const { return p_.ends != nullptr ? p_.ends[s + 1] - p_.ends[s] : p_.queries; }

    Seen seen_by(int64_t s, int64_t query) const {
        if (p_.spans != nullptr) {
            const int32_t* span = p_.spans + (before(s) + query) * 2;
            return {span[0], span[1]};
        }
        int64_t past = p_.page_size;
        if (p_.causal && p_.position + query + 1 < past) past = p_.position + query + 1;
        return {0, static_cast<int32_t>(past > 0 ? past : 0)};
    }

    // Where a head of a query begins.
    int64_t place_of(const kpt_heads& x, int64_t s, int64_t query, int64_t head) const {
        const int64_t tokens = p_.ends != nullptr ? (p_.ends[s] + query) * x.stride_t : s * x.stride_b + query * x.stride_t;
        return tokens + head * x.stride_h;
    }

    // The keys that some query of a sequence sees, and in how many parts.
    Sequence look_at(int64_t s) const {
        const int64_t queries = queries_of(s);
        Sequence found{INT64_MAX, 0, 0, queries * groups_, 0, 0};
        for (int64_t query = 0; query < queries; query++) {
            const Seen seen = seen_by(s, query);
            if (seen.begin >= seen.end) continue;
            if (seen.begin < found.begin) found.begin = seen.begin;
            if (seen.end > found.end) found.end = seen.end;
        }
        if (found.end == 0) found.begin = 0;
        if (p_.bias.data != nullptr && p_.bias.stride_h == 0) leave_out_hidden(s, queries, found);
        found.splits = (found.end - found.begin + kSplit - 1) / kSplit;
        return found;
    }

    // Leave out the first and the last keys that a bias of -inf, which the heads share, hides from all queries: a cache
    // of fixed length is seldom full.
    void leave_out_hidden(int64_t s, int64_t queries, Sequence& found) const {
        with_float_type(p_.bias.dtype, [&](auto kind) {
            const auto* bias = static_cast<const decltype(kind)*>(p_.bias.data);
            const auto is_hidden = [&](int64_t key) {
                for (int64_t query = 0; query < queries; query++) {
                    if (load(bias + place_of(p_.bias, s, query, 0) + key, 1)[0] != -__builtin_inff()) return false;
                }
                return true;
            };
            while (found.begin < found.end && is_hidden(found.end - 1)) found.end--;
            while (found.begin < found.end && is_hidden(found.begin)) found.begin++;
        });
    }

    // Where `count` keys lie from `from` on; the last one's place up to `filled`.
    template <class T>
    void find_lines(
        const kpt_pages& x, const Part& part, int64_t from, int64_t count, int64_t filled, const T** to) const {
        const int64_t size = p_.page_size;
        for (int64_t j = 0; j < count;) {
            int64_t page = part.sequence, place = from + j, past = count;
            if (p_.table != nullptr) {
                page = p_.table[part.sequence * p_.table_stride + place / size];
                place %= size;
                if (j + size - place < past) past = j + size - place;
            }
            const T* at = static_cast<const T*>(x.data) + page * x.stride_page + place * x.stride_token + part.head * x.stride_head;
            for (; j < past; j++, at += x.stride_token) to[j] = at;
        }
        for (int64_t j = count; j < filled; j++) to[j] = to[count - 1];
    }

    // Of each row: the output, not divided yet, the largest score, and the sum of the exponentials less that. Results of
    // heads are `step` apart.
    // Heads whose keys lie together are read in turn for a few keys, so that memory is read in its order. What comes next is
    // fetched, as far as the cache that holds it: values while scores are computed, and then the next keys.
    template <class T>
    void attend(const Part& part, int64_t rows, const char* q, float* scores, float* results, int64_t step) const {
        const int64_t padded = (rows + kRows - 1) / kRows * kRows;
        const T* places[3][kChunk];
        const T **keys = places[0], **ahead = places[1], **values = places[2];
        const int64_t keys_at_once = at_once<T>(p_.k), values_at_once = at_once<T>(p_.v);
        const auto count_of = [&](int64_t from) { return part.end - from < kChunk ? part.end - from : kChunk; };
        if (part.begin < part.end) find_lines(p_.k, part, part.begin, count_of(part.begin), 0, keys);
        for (int64_t from = part.begin; from < part.end; from += kChunk) {
            const int64_t count = count_of(from), next = from + kChunk;
            const bool unread = from == part.begin, last = next >= part.end;
            find_lines(p_.v, part, from, count, 0, values);
            if (!last) find_lines(p_.k, part, next, count_of(next), count, ahead);
            for (int64_t j = 0; j < count; j += keys_at_once) {
                const int64_t past = count - j < keys_at_once ? count : j + keys_at_once;
                for (int64_t h = 0; h < part.heads; h++) {
                    const int64_t k_at = h * p_.k.stride_head, v_at = h * p_.v.stride_head;
                    for (int64_t row = h * padded; row < h * padded + rows; row += kRows) {
                        with_rows(h * padded + rows - row, [&](auto height) {
                            const T* const* fetched = row == h * padded ? values : nullptr;
                            const char* own = q + row * staging_.bytes();
                            float* to = scores + row * kChunk;
#if KPT_HAS_BF16_DOT
                            if constexpr (sizeof(T) == 1 || is_bfloat16<T>) {
                                if (staging_.bf16) {
                                    multiply<Bfloat16Dot<T>, height()>(*this, keys, k_at, fetched, v_at, unread, j, past, own, to);
                                    return;
                                }
                            }
#endif
                            multiply<FloatDot<T>, height()>(*this, keys, k_at, fetched, v_at, unread, j, past, own, to);
                        });
                    }
                }
            }
            for (int64_t h = 0; h < part.heads; h++) {
                const float scale = p_.scale * (p_.k_scale != nullptr ? p_.k_scale[part.head + h] : 1.0f);
                for (int64_t row = 0; row < rows; row++) {
                    float* own = scores + (h * padded + row) * kChunk;
                    const int64_t query = row / groups_, head = (part.head + h) * groups_ + row % groups_;
                    score(own, count, scale);
                    add_to_scores(own, part.sequence, query, head, from, count);
                    weigh(seen_by(part.sequence, query), from, count, own, results + h * step + row * per_row_);
                }
            }
            for (int64_t j = 0; j < count; j += values_at_once) {
                const int64_t past = count - j < values_at_once ? count : j + values_at_once;
                for (int64_t h = 0; h < part.heads; h++) {
                    const int64_t k_at = h * p_.k.stride_head, v_at = h * p_.v.stride_head;
                    for (int64_t row = 0; row < rows; row += kRows) {
                        with_rows(rows - row, [&](auto height) {
                            add<T, height()>(
                                *this, values, v_at, row == 0 && !last ? ahead : nullptr, k_at, j, past,
                                scores + (h * padded + row) * kChunk, results + h * step + row * per_row_);
                        });
                    }
                }
            }
            const T** read = keys;
            keys = ahead;
            ahead = read;
        }
    }

    template <class T>
    static int64_t at_once(const kpt_pages& x) {
        return x.stride_token * static_cast<int64_t>(sizeof(T)) > kFar ? kTogether : kChunk;
    }

    // Bring the queries of some heads of keys together, as they are multiplied, and clear their results.
    void prepare(const Part& part, int64_t rows, char* q, float* query, float* results, int64_t step) const {
        const int64_t padded = (rows + kRows - 1) / kRows * kRows;
        for (int64_t row = 0; row < part.heads * rows; row++) {
            const int64_t h = row / rows, own_row = row % rows;
            const int64_t at = place_of(p_.q, part.sequence, own_row / groups_, (part.head + h) * groups_ + own_row % groups_);
            const char* from = static_cast<const char*>(p_.q.data) + at * size_of(p_.q.dtype);
            widen_all(from, p_.q.dtype, p_.dim, query);
            stage(staging_, query, 0, p_.dim, q + (h * padded + own_row) * staging_.bytes());
            float* own = results + h * step + own_row * per_row_;
            for (int64_t i = 0; i < value_pitch_; i += W) store(own + i, vf{});
            own[value_pitch_] = -__builtin_inff();
            own[value_pitch_ + 1] = 0.0f;
        }
    }

    // Call `body` with how many rows are computed at once, of which there must be room.
    template <class Body>
    KPT_INLINE void with_rows(int64_t rows, Body&& body) {
        if (rows >= kRows) body(std::integral_constant<int, kRows>{});
        else if (rows == 3) body(std::integral_constant<int, 3>{});
        else if (rows == 2) body(std::integral_constant<int, 2>{});
        else body(std::integral_constant<int, 1>{});
    }

    // Products of some rows with the keys from `first` on; the values of these are fetched, if any are given, and keys ahead
    // if they are `unread`.
    template <class D, int R>
    KPT_INLINE void multiply(
        const Kernel& self, const typename D::Weight* const* keys, int64_t k_at, const typename D::Weight* const* values,
        int64_t v_at, bool unread, int64_t first, int64_t past, const char* staged, float* scores) {
        constexpr int Keys = R == 1 || W == 16 ? 4 : 2;
        const auto* q = reinterpret_cast<const typename D::Staged*>(staged);
        const int64_t dim = self.p_.dim, value_dim = self.p_.value_dim, pitch = self.staging_.padded();
        for (int64_t j = first; j < past; j += Keys) {
            const typename D::Weight* own[Keys];
            for (int n = 0; n < Keys; n++) {
                own[n] = keys[j + n < past ? j + n : past - 1] + k_at;
                if (values == nullptr) continue;
                fetch(values[j + n < past ? j + n : past - 1] + v_at, value_dim);
                if (unread && j + n + kAhead < past) fetch(keys[j + n + kAhead] + k_at, dim);
            }
            vf sums[(R * Keys + 3) / 4 * 4] = {};
            typename D::Vector x[Keys][D::vectors];
            const auto step = [&](int64_t i) {
                for (int row = 0; row < R; row++) {
                    for (int part = 0; part < D::vectors; part++) {
                        const auto query = D::get_x(q + row * pitch + i + part * (D::numbers / D::vectors));
                        for (int n = 0; n < Keys; n++) sums[row * Keys + n] = D::dot(sums[row * Keys + n], query, x[n][part]);
                    }
                }
            };
            int64_t i = 0;
            for (; i + D::numbers <= dim; i += D::numbers) {
                for (int n = 0; n < Keys; n++) D::get(own[n] + i, x[n]);
                step(i);
            }
            if (i < dim) {
                for (int n = 0; n < Keys; n++) D::get(own[n] + i, dim - i, x[n]);
                step(i);
            }
            float products[(R * Keys + 3) / 4 * 4];
            for (int n = 0; n < R * Keys; n += 4) sums_of_four(sums + n, products + n);
            for (int row = 0; row < R; row++) memcpy(scores + row * kChunk + j, products + row * Keys, Keys * sizeof(float));
        }
    }

    // Scale and cap products of a row.
    void score(float* scores, int64_t count, float scale) const {
        for (int64_t j = 0; j < count; j += W) {
            vf score = load(scores + j) * scale;
            if (p_.softcap > 0.0f) score = tanh(score / p_.softcap) * p_.softcap;
            store(scores + j, score);
        }
    }

    // Add what a query's scores get beside their products.
    void add_to_scores(float* scores, int64_t s, int64_t query, int64_t head, int64_t from, int64_t count) const {
        if (p_.bias.data != nullptr) {
            with_float_type(p_.bias.dtype, [&](auto kind) {
                const auto* bias = static_cast<const decltype(kind)*>(p_.bias.data) + place_of(p_.bias, s, query, head) + from;
                for (int64_t j = 0; j < count; j += W) store(scores + j, load(scores + j) + load(bias + j, count - j));
            });
        }
        if (p_.slopes == nullptr && p_.by_distance == nullptr) return;
        const int64_t place = p_.places != nullptr ? p_.places[before(s) + query] : p_.position + query;
        const int64_t most = p_.far;
        for (int64_t j = 0; p_.slopes != nullptr && j < count; j++) {
            const int64_t distance = from + j - place;
            scores[j] -= p_.slopes[s * p_.slopes_stride + head] * static_cast<float>(distance < 0 ? -distance : distance);
        }
        for (int64_t j = 0; p_.by_distance != nullptr && j < count; j++) {
            const int64_t distance = from + j - place;
            const int64_t at = distance < -most ? -most : distance > most ? most : distance;
            scores[j] += p_.by_distance[head * (2 * most + 1) + most + at];
        }
    }

    // Turn scores of a row into weights, and fade what it has so far.
    void weigh(Seen span, int64_t from, int64_t count, float* scores, float* result) const {
        float* state = result + value_pitch_;
        vf most = splat(state[0]);
        const bool all = span.begin <= from && span.end >= from + count && count % W == 0;
        for (int64_t j = 0; all && j < count; j += W) most = larger(most, load(scores + j));
        vi places;
        for (int i = 0; i < W; i++) places[i] = i;
        for (int64_t j = 0; !all && j < count; j += W) {
            vf score = load(scores + j);
            const vi place = places + static_cast<int32_t>(from + j);
            const vi seen = (place >= span.begin) & (place < span.end) & (place < static_cast<int32_t>(from + count));
            score = select(seen, score, splat(-__builtin_inff()));
            most = larger(most, score);
            store(scores + j, score);
        }
        const float largest = largest_of(most);
        const float base = largest > -FLT_MAX ? largest : -FLT_MAX;
        vf total = {};
        for (int64_t j = 0; j < count; j += W) {
            const vf weight = exp_of_loss(load(scores + j) - base);
            total += weight;
            store(scores + j, weight);
        }
        const float fading = state[0] == largest ? 1.0f : exp_of_loss(splat(state[0] - base))[0];
        state[0] = largest;
        state[1] = state[1] * fading + sum_of(total);
        if (fading == 1.0f) return;
        for (int64_t i = 0; i < value_pitch_; i += W) store(result + i, load(result + i) * fading);
    }

    // Add the weighted values from `first` on to some rows; what is `ahead` is fetched.
    template <class T, int R>
    KPT_INLINE void add(
        const Kernel& self, const T* const* values, int64_t v_at, const T* const* ahead, int64_t k_at, int64_t first, int64_t past,
        const float* weights, float* result) {
        const int64_t dim = self.p_.value_dim;
        constexpr int wide = R == 1 ? 2 : 1;
        int64_t i = 0;
        for (; i + 2 * wide * W <= dim; i += 2 * wide * W) {
            add_columns<T, R, wide>(self, values, v_at, ahead, k_at, first, past, weights, result, i);
        }
        for (; i + 2 * W <= dim; i += 2 * W) {
            add_columns<T, R, 1>(self, values, v_at, ahead, k_at, first, past, weights, result, i);
        }
        for (; i < dim; i += W) {
            for (int row = 0; row < R; row++) {
                vf sum = {};
                for (int64_t j = first; j < past; j++) {
                    sum += load(values[j] + v_at + i, dim - i) / unit<T> * splat(weights[row * kChunk + j]);
                }
                float* to = result + row * self.per_row_ + i;
                store(to, load(to) + sum);
            }
        }
    }

    // The same of so many pairs of vectors from column `i` on.
    template <class T, int R, int Pairs>
    KPT_INLINE void add_columns(
        const Kernel& self, const T* const* values, int64_t v_at, const T* const* ahead, int64_t k_at, int64_t first, int64_t past,
        const float* weights, float* result, int64_t i) {
        vf sums[R][2 * Pairs] = {};
        for (int64_t j = first; j < past; j++) {
            vf value[2 * Pairs];
            for (int pair = 0; pair < Pairs; pair++) {
                if (ahead != nullptr) fetch(ahead[j] + k_at + i + 2 * pair * W, 2 * W);
                get_two(values[j] + v_at + i + 2 * pair * W, value + 2 * pair);
            }
            for (int row = 0; row < R; row++) {
                const vf weight = splat(weights[row * kChunk + j]);
                for (int n = 0; n < 2 * Pairs; n++) sums[row][n] += value[n] * weight;
            }
        }
        for (int row = 0; row < R; row++) {
            float* to = result + row * self.per_row_ + i;
            for (int pair = 0; pair < Pairs; pair++) order_two<T>(sums[row] + 2 * pair);
            for (int n = 0; n < 2 * Pairs; n++) store(to + n * W, load(to + n * W) + sums[row][n]);
        }
    }

    // Join the parts of a sequence and a head of keys, the sink among them, and write the results.
    void merge(int64_t s, int64_t kv_head, int64_t rows, float* parts, int64_t splits) const {
        const int64_t per_row = per_row_;
        for (int64_t row = 0; row < rows; row++) {
            const int64_t query = row / groups_, head = kv_head * groups_ + row % groups_;
            float largest = p_.sinks != nullptr ? p_.sinks[head] : -__builtin_inff();
            for (int64_t split = 0; split < splits; split++) {
                const float own = parts[(split * rows + row) * per_row + value_pitch_];
                if (own > largest || own != own) largest = own;
            }
            const float base = largest < -FLT_MAX ? -FLT_MAX : largest;
            float total = p_.sinks != nullptr ? weight_of(p_.sinks[head] - base) : 0.0f;
            for (int64_t split = 0; split < splits; split++) {
                float* own = parts + (split * rows + row) * per_row + value_pitch_;
                own[0] = weight_of(own[0] - base);
                total += own[1] * own[0];
            }
            const bool dead = total == 0.0f;
            const float one = p_.v.dtype == KPT_FLOAT8_E4M3FN ? unit<e4m3> : 1.0f;
            const float factor = one * (p_.v_scale != nullptr ? p_.v_scale[kv_head] : 1.0f) / (dead ? 1.0f : total);
            if (p_.lse != nullptr) {
                const int64_t at = p_.ends != nullptr ? (p_.ends[s] + query) * p_.heads + head : (s * p_.heads + head) * p_.queries + query;
                p_.lse[at] = dead ? -__builtin_inff() : base + __builtin_logf(total);
            }
            with_float_type(p_.out.dtype, [&](auto kind) {
                using Out = decltype(kind);
                Out* to = static_cast<Out*>(p_.out.data) + place_of(p_.out, s, query, head);
                for (int64_t i = 0; i < p_.value_dim; i += W) {
                    vf sum = {};
                    for (int64_t split = 0; split < splits; split++) {
                        const float* own = parts + (split * rows + row) * per_row;
                        sum += load(own + i) * own[value_pitch_];
                    }
                    store(to + i, sum * factor, p_.value_dim - i);
                }
            });
        }
    }

    static float weight_of(float x) { return exp_of_loss(splat(x))[0]; }

    const struct kpt_attention_paged& p_;
    const int64_t groups_;
    const Staging staging_;
    const int64_t value_pitch_, per_row_;
    Sequence* sequences_ = nullptr;
};

}  // namespace

extern "C" int kpt_attention_paged(const struct kpt_attention_paged* given) { return Kernel(*given).run(); }
