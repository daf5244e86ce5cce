// The gradients of attention.dense: a tile of queries after the other makes its own gradient, and adds to those of the keys
// and values that it sees. A task has the tiles of a head of keys, or some of them, in one order, and sums of its own.
#include "attention.h"

using namespace kpt;

namespace {

using Given = struct kpt_attention_backward;

// So many blocks are looked at twice, since short rows are where one key may have all of the weight; in float32 any number
// for so few queries, whose gradients are too few for errors to be lost among others.
constexpr int64_t kFewBlocks = 3, kFewRows = 16;
constexpr int64_t kSmallSums = int64_t{1} << 26;

template <class Kind>
class Tile {
public:
    // Distances of rows of weights: keys by queries, and slots of keys by queries.
    static constexpr int64_t kAlong = kTileQueries / Kind::per_slot + 16, kAcross = kTileQueries + 16;

    Tile(const Given& g, Room room)
        : g_(g), p_(g.forward), pitch_(round_up(p_.dim, kPanel)), value_pitch_(round_up(p_.value_dim, kPanel)),
          depth_(depth_of<Kind>(p_.dim)), value_depth_(depth_of<Kind>(p_.value_dim)), mask_(p_, room),
          added_(p_, room), dropout_(p_, room),
          by_step_(room.take<float>(wants_steps() ? p_.keys + kTileQueries : 0)),
          q_(room.take<slot>(kTileQueries * depth_)), grad_(room.take<slot>(kTileQueries * value_depth_)),
          q_lines_(room.take<slot>(depth_of<Kind>(kTileQueries) * pitch_)),
          grad_lines_(room.take<slot>(depth_of<Kind>(kTileQueries) * value_pitch_)),
          k_(room.take<slot>(kBlockKeys * kPitch)), v_(room.take<slot>(kBlockKeys * kPitch)),
          k_lines_(room.take<slot>(depth_of<Kind>(kBlockKeys) * pitch_)), scores_(room.take<float>(kBlockKeys * kPanel)),
          changes_(room.take<float>(kBlockKeys * kPanel)), weights_(room.take<slot>(kBlockKeys * kAlong)),
          slopes_(room.take<slot>(kBlockKeys * kAlong)),
          slopes_across_(Kind::per_slot == 1 ? slopes_ : room.take<slot>(kBlockKeys / 2 * kAcross)),
          slopes_lines_(room.take<slot>(Kind::step == 1 ? 0 : kTileQueries * kAlong)),
          grad_q_(room.take<float>(kTileQueries * pitch_)), largest_(room.take<float>(kTileQueries)),
          total_(room.take<float>(kTileQueries)), common_(room.take<float>(kTileQueries)),
          returned_(room.take<float>(kTileQueries)), size_(room.size()) {}
    int64_t size() const { return size_; }

    // Add to the gradients of a head of keys, [keys, pitch] and [keys, value_pitch].
    void run(int64_t batch, int64_t head, int64_t first, float* grad_k, float* grad_v) {
        const int64_t of_keys = head / (p_.heads / p_.kv_heads);
        rows_ = p_.queries - first < kTileQueries ? p_.queries - first : kTileQueries;
        panels_ = (rows_ + kPanel - 1) / kPanel;
        mask_.look(batch, head, first);
        added_.look(batch, head, first);
        dropout_.look(batch, head, first);
        if (wants_steps()) memset(by_step_, 0, (p_.keys + kTileQueries) * sizeof(float));
        with_float_type(p_.q.dtype, [&](auto type) { look_at_rows<decltype(type)>(batch, head, first); });
        pack_queries(batch, head, first);
        if (g_.grad_bias != nullptr) bias_ = g_.grad_bias + ((batch * p_.heads + head) * p_.queries + first) * p_.keys;
        memset(grad_q_, 0, kTileQueries * pitch_ * sizeof(float));
        sum_changes(batch, of_keys);
        for (int64_t block = mask_.blocks().begin; block < mask_.blocks().end; block++) {
            int64_t from = 0, to = panels_;
            while (from < to && mask_.state(block, from) == kDead) from++;
            while (from < to && mask_.state(block, to - 1) == kDead) to--;
            if (from < to) add_block(batch, of_keys, block, from, to, grad_k, grad_v);
        }
        if (wants_steps()) write_steps((batch * p_.heads + head) * ((p_.queries + kTileQueries - 1) / kTileQueries), first);
        if (g_.grad_q.data == nullptr) return;
        with_float_type(g_.grad_q.dtype, [&](auto type) {
            using T = decltype(type);
            for (int64_t q = 0; q < rows_; q++) {
                T* to = token_of<T>(g_.grad_q, batch, head, first + q);
                for (int64_t j = 0; j < p_.dim; j += W) store(to + j, load(grad_q_ + q * pitch_ + j) * p_.scale, p_.dim - j);
            }
        });
    }

private:
    // What is known of each row; a row that sees nothing has zeros.
    template <class T>
    void look_at_rows(int64_t batch, int64_t head, int64_t first) {
        const int64_t at = (batch * p_.heads + head) * p_.queries + first;
        for (int64_t q = 0; q < kTileQueries; q++) {
            const bool there = q < rows_;
            largest_[q] = there ? p_.largest[at + q] : 0.0f;
            total_[q] = there ? p_.total[at + q] : 1.0f;
            common_[q] = returned_[q] = 0.0f;
            if (!there) continue;
            if (largest_[q] > kLowest || largest_[q] != largest_[q]) {
                const T* out = token_of<const T>(p_.out, batch, head, first + q);
                const T* grad = token_of<const T>(g_.grad, batch, head, first + q);
                vf sum = {};
                for (int64_t j = 0; j < p_.value_dim; j += W) {
                    sum += load(out + j, p_.value_dim - j) * load(grad + j, p_.value_dim - j);
                }
                returned_[q] = g_.grad_lse != nullptr ? g_.grad_lse[at + q] : 0.0f;
                common_[q] = sum_of(sum) - returned_[q];
            }
            g_.common[at + q] = common_[q];
        }
        // Summed over all keys of a row, it cancels to the last digit where one has all of the weight.
        for (int64_t panel = 0; panel < panels_; panel++) {
            int64_t live = 0;
            for (int64_t block = mask_.blocks().begin; block < mask_.blocks().end; block++) {
                live += mask_.state(block, panel) != kDead;
            }
            whole_[panel] = live == 1 && p_.sinks == nullptr;
            const bool short_enough = live <= kFewBlocks || (rows_ < kFewRows && Kind::per_slot == 1);
            few_[panel] = live > 1 && short_enough && p_.sinks == nullptr;
        }
    }

    void pack_queries(int64_t batch, int64_t head, int64_t first) {
        pack_panels<Kind>(factor_of(p_.q, batch, head, true), first, rows_, 0, p_.dim, q_);
        pack_panels<Kind>(factor_of(g_.grad, batch, head, true), first, rows_, 0, p_.value_dim, grad_);
        lines_depth_ = depth_of<Kind>(rows_);
        pack_panels<Kind>(factor_of(p_.q, batch, head, false), 0, p_.dim, first, rows_, q_lines_);
        pack_panels<Kind>(factor_of(g_.grad, batch, head, false), 0, p_.value_dim, first, rows_, grad_lines_);
        for (int64_t q = 0; q < rows_; q++) {
            if (mask_.sees(q) && largest_[q] != kLowest) continue;
            // Nothing times NaN is NaN.
            zero_line<Kind>(q_lines_, lines_depth_, p_.dim, q);
            zero_line<Kind>(grad_lines_, lines_depth_, p_.value_dim, q);
        }
    }

    void add_block(int64_t batch, int64_t head, int64_t block, int64_t from, int64_t to, float* grad_k, float* grad_v) {
        const int64_t begin = block * kBlockKeys, keys = mask_.end_of(block) - begin;
        pack_lines<Kind>(factor_of(p_.k, batch, head, true), begin, keys, 0, p_.dim, k_);
        pack_lines<Kind>(factor_of(p_.v, batch, head, true), begin, keys, 0, p_.value_dim, v_);
        Span spans[kTilePanels], all{keys, 0};
        for (int64_t panel = from; panel < to; panel++) {
            spans[panel] = {0, 0};
            if (mask_.state(block, panel) == kDead) continue;
            spans[panel] = span_of<Kind>(mask_, block, panel);
            if (spans[panel].begin < all.begin) all.begin = spans[panel].begin;
            if (spans[panel].end > all.end) all.end = spans[panel].end;
        }
        if (Kind::step > 1) all.end = round_up(all.end, kAtOnce<Kind>);
        for (int64_t panel = from; panel < to; panel++) {
            if (spans[panel].begin < spans[panel].end) {
                weigh(block, panel, spans[panel]);
                if (g_.grad_bias != nullptr) write_bias(block, panel, spans[panel]);
                if (wants_steps()) add_steps(block, panel, spans[panel]);
            }
            clear(panel, spans[panel], all);
        }
        const int64_t first = from * kPanel, last = to * kPanel < rows_ ? to * kPanel : rows_;
        const int64_t slots = depth_of<Kind>(last - first), skipped = first / Kind::per_slot;
        if (grad_v != nullptr) {
            multiply_lines<Kind, kAlong>(
                weights_ + all.begin * kAlong + skipped, all.end - all.begin, grad_lines_ + skipped * kPanel, lines_depth_,
                value_pitch_, slots, grad_v + (begin + all.begin) * value_pitch_, value_pitch_, true);
        }
        if (grad_k != nullptr) {
            multiply_lines<Kind, kAlong>(
                slopes_ + all.begin * kAlong + skipped, all.end - all.begin, q_lines_ + skipped * kPanel, lines_depth_,
                pitch_, slots, grad_k + (begin + all.begin) * pitch_, pitch_, true);
        }
        if (g_.grad_q.data == nullptr) return;
        const int64_t k_depth = depth_of<Kind>(keys), at = all.begin / Kind::per_slot;
        pack_panels<Kind>(factor_of(p_.k, batch, head, false), 0, p_.dim, begin, keys, k_lines_);
        if (any_wild<Kind>(k_lines_, k_depth * pitch_)) mask_.template zero_unseen<Kind>(block, k_lines_, k_depth, p_.dim);
        // Rows of float32 are read across; pairs lie in an order of their own.
        constexpr int64_t pitch = Kind::per_slot == 1 ? kAlong : kAcross;
        const int64_t depth = (all.end - all.begin + Kind::per_slot - 1) / Kind::per_slot;
        const slot *slopes = slopes_across_ + at * pitch + first, *keys_across = k_lines_ + at * kPanel;
        float* to_q = grad_q_ + first * pitch_;
        if constexpr (Kind::step == 1) {
            multiply_block<Kind, 1, pitch>(slopes, last - first, keys_across, k_depth, pitch_, depth, to_q, pitch_, true);
        } else {
            turn<kAlong>(slopes, pitch, round_up(last - first, kAtOnce<Kind>), depth, slopes_lines_);
            multiply_lines<Kind, kAlong>(
                slopes_lines_, last - first, keys_across, k_depth, pitch_, depth, to_q, pitch_, true);
        }
    }

    // Scores of a panel against the keys of a span, and how the result changes with their weights.
    void score(int64_t block, int64_t panel, Span span) {
        const int64_t place = panel * kPanel, count = span.end - span.begin;
        multiply_lines<Kind, kPitch>(
            k_ + span.begin * kPitch, count, q_ + place * depth_, depth_, kPanel, depth_, scores_ + span.begin * kPanel,
            kPanel, false);
        multiply_lines<Kind, kPitch>(
            v_ + span.begin * kPitch, count, grad_ + place * value_depth_, value_depth_, kPanel, value_depth_,
            changes_ + span.begin * kPanel, kPanel, false);
        vf most[2] = {};
        finish_scores(p_, mask_, added_, block, panel, span, scores_, most);
        for (int64_t key = span.begin; dropout_.any() && key < span.end; key++) {
            for (int64_t lane = 0; lane < kPanel; lane += W) {
                float* at = changes_ + key * kPanel + lane;
                store(at, Dropout::kept(dropout_, load(at) * p_.drop_scale, place + lane, block * kBlockKeys + key));
            }
        }
    }

    // A function that gives the weights of a key.
    auto weights_of(int64_t place, int64_t lane) const {
        const vf largest = load(largest_ + place + lane), total = load(total_ + place + lane), inverse = 1.0f / total;
        const float* scores = scores_ + lane;
        return [=](int64_t key) {
            const vf e = exp_of_loss(load(scores + key * kPanel) - largest), p = e * inverse;
            return p + (e - p * total) * inverse;  // as a division rounds
        };
    }

    template <class Weight>
    vf changes_of(const Weight& weight, int64_t lane, Span span) const {
        vf sum = {};
        for (int64_t key = span.begin; key < span.end; key++) {
            const vf p = weight(key);
            sum += select(p == 0.0f, vf{}, p * load(changes_ + key * kPanel + lane));
        }
        return sum;
    }

    // Where a panel sees a few blocks, sum beforehand what all its scores' gradients lose.
    void sum_changes(int64_t batch, int64_t head) {
        bool any = false;
        for (int64_t panel = 0; panel < panels_; panel++) {
            any |= few_[panel];
            for (int64_t q = 0; few_[panel] && q < kPanel; q++) common_[panel * kPanel + q] = -returned_[panel * kPanel + q];
        }
        for (int64_t block = mask_.blocks().begin; any && block < mask_.blocks().end; block++) {
            const int64_t begin = block * kBlockKeys, keys = mask_.end_of(block) - begin;
            pack_lines<Kind>(factor_of(p_.k, batch, head, true), begin, keys, 0, p_.dim, k_);
            pack_lines<Kind>(factor_of(p_.v, batch, head, true), begin, keys, 0, p_.value_dim, v_);
            for (int64_t panel = 0; panel < panels_; panel++) {
                if (!few_[panel] || mask_.state(block, panel) == kDead) continue;
                const Span span = span_of<Kind>(mask_, block, panel);
                if (span.begin >= span.end) continue;
                score(block, panel, span);
                for (int64_t lane = 0; lane < kPanel; lane += W) {
                    float* common = common_ + panel * kPanel + lane;
                    store(common, load(common) + changes_of(weights_of(panel * kPanel, lane), lane, span));
                }
            }
        }
    }

    // Weights of a panel against the keys of a span, and the gradients of its scores.
    void weigh(int64_t block, int64_t panel, Span span) {
        const int64_t place = panel * kPanel;
        // What is added may hide keys as well.
        const bool full = mask_.state(block, panel) == kFull && !added_.any();
        const bool keeping = g_.grad_bias != nullptr || wants_steps(), dropping = dropout_.any();
        score(block, panel, span);
        for (int half = 0; half < 2; half++) {
            const int64_t lane = half * W;
            const auto weight = weights_of(place, lane);
            const vf common = whole_[panel] ? changes_of(weight, lane, span) - load(returned_ + place + lane)
                                            : load(common_ + place + lane);
            for (int64_t key = span.begin; key < span.end; key += Kind::per_slot) {
                vf slopes[Kind::per_slot] = {};
                for (int j = 0; j < Kind::per_slot && key + j < span.end; j++) {
                    const vf score = load(scores_ + (key + j) * kPanel + lane);
                    vf p = weight(key + j);
                    slopes[j] = p * (load(changes_ + (key + j) * kPanel + lane) - common);
                    if (p_.softcap > 0.0f) {
                        const vf capped = score / p_.softcap;
                        slopes[j] *= 1.0f - capped * capped;
                    }
                    if (!full) slopes[j] = select(score == -__builtin_inff(), vf{}, slopes[j]);
                    if (keeping) store(changes_ + (key + j) * kPanel + lane, slopes[j]);
                    if (dropping) p = Dropout::kept(dropout_, p * p_.drop_scale, place + lane, block * kBlockKeys + key + j);
                    put(weights_, key + j, place + lane, p);
                    put(slopes_, key + j, place + lane, slopes[j]);
                }
                if constexpr (Kind::per_slot == 2) {
                    store_slots<Kind>(slopes_across_ + key / 2 * kAcross + place + lane, slots_of<Kind>(slopes));
                }
            }
        }
    }

    // The gradients of a panel's scores, which took the place of changes, as those of the bias.
    void write_bias(int64_t block, int64_t panel, Span span) const {
        for (int64_t lane = 0; lane < kPanel; lane += W) {
            const int64_t query = panel * kPanel + lane;
            for (int64_t key = span.begin; key < span.end; key += W) {
                vi each[W] = {};
                for (int64_t i = 0; i < W && key + i < span.end; i++) {
                    each[i] = as_bits(load(changes_ + (key + i) * kPanel + lane));
                }
                transpose(each);
                float* to = bias_ + query * p_.keys + block * kBlockKeys + key;
                for (int64_t i = 0; i < W && query + i < rows_; i++) {
                    store(to + i * p_.keys, as_floats(each[i]), span.end - key);
                }
            }
        }
    }

    bool wants_steps() const { return g_.grad_slopes != nullptr || g_.grad_by_distance != nullptr; }

    // Add them by how far a query's number is from a key's; of the last key and the tile's first query it is place 0.
    void add_steps(int64_t block, int64_t panel, Span span) const {
        for (int64_t key = span.begin; key < span.end; key++) {
            float* to = by_step_ + (p_.keys - 1 - (block * kBlockKeys + key)) + panel * kPanel;
            for (int64_t lane = 0; lane < kPanel; lane += W) {
                store(to + lane, load(to + lane) + load(changes_ + key * kPanel + lane));
            }
        }
    }

    // Sum them to the tile's parts of the gradients; `tile` is the number of the head's first.
    void write_steps(int64_t tile, int64_t first) const {
        tile += first / kTileQueries;
        const int64_t most = p_.far, width = 2 * most + 1;
        float* near = g_.grad_by_distance == nullptr ? nullptr : g_.grad_by_distance + tile * width;
        if (near != nullptr) memset(near, 0, width * sizeof(float));
        double slope = 0.0, ends[2] = {};
        for (int64_t step = 0; step < p_.keys + kTileQueries - 1; step++) {
            const int64_t distance = p_.keys - 1 - step - first - p_.position;
            const double sum = static_cast<double>(by_step_[step]);
            slope -= sum * static_cast<double>(distance < 0 ? -distance : distance);
            if (distance <= -most) ends[0] += sum;
            else if (distance >= most) ends[1] += sum;
            else if (near != nullptr) near[most + distance] += by_step_[step];
        }
        if (g_.grad_slopes != nullptr) g_.grad_slopes[tile] = static_cast<float>(slope);
        if (near == nullptr) return;
        near[0] += static_cast<float>(ends[0]);
        near[2 * most] += static_cast<float>(ends[1]);
    }

    static void put(slot* to, int64_t key, int64_t query, vf value) {
        if constexpr (Kind::per_slot == 1) store(reinterpret_cast<float*>(to + key * kAlong + query), value);
        else store(reinterpret_cast<bfloat16*>(to + key * kAlong) + query, value);
    }

    // Zero what a panel has of other keys than its own.
    void clear(int64_t panel, Span span, Span all) {
        const int64_t place = panel * kPanel;
        for (int64_t key = all.begin; key < all.end; key++) {
            if (key >= span.begin && key < span.end) continue;
            for (int half = 0; half < 2; half++) {
                put(weights_, key, place + half * W, vf{});
                put(slopes_, key, place + half * W, vf{});
            }
        }
        if constexpr (Kind::per_slot == 2) {
            const vf none[2] = {};
            for (int64_t key = all.begin / 2 * 2; key < all.end; key += 2) {
                if (key + 1 >= span.begin && key < span.end && span.begin < span.end) continue;
                for (int half = 0; half < 2; half++) {
                    store_slots<Kind>(slopes_across_ + key / 2 * kAcross + place + half * W, slots_of<Kind>(none));
                }
            }
        }
    }

    const Given& g_;
    const kpt_attention& p_;
    const int64_t pitch_, value_pitch_, depth_, value_depth_;
    Mask mask_;
    Added added_;
    Dropout dropout_;
    float *by_step_, *bias_ = nullptr;
    slot *q_, *grad_, *q_lines_, *grad_lines_, *k_, *v_, *k_lines_;
    float *scores_, *changes_;
    slot *weights_, *slopes_, *slopes_across_, *slopes_lines_;
    float *grad_q_, *largest_, *total_, *common_, *returned_;
    int64_t size_, rows_ = 0, panels_ = 0, lines_depth_ = 0;
    bool whole_[kTilePanels], few_[kTilePanels];
};

// Sums [keys, pitch] of the parts of a head of keys, in their order.
template <class T>
void sum_parts(
    const kpt_heads& out, int64_t batch, int64_t head, Span keys, int64_t columns, int64_t pitch, const float* sums,
    int64_t parts, int64_t distance, float scale) {
    for (int64_t key = keys.begin; key < keys.end; key++) {
        T* to = token_of<T>(out, batch, head, key);
        for (int64_t j = 0; j < columns; j += W) {
            vf sum = load(sums + key * pitch + j);
            for (int64_t part = 1; part < parts; part++) sum += load(sums + part * distance + key * pitch + j);
            store(to + j, sum * scale, columns - j);
        }
    }
}

// Bytes that the sums of all tasks may have: as many as the tensors that the call is given and returns, or what is little anyway.
int64_t most_of_sums(const kpt_attention& p) {
    const int64_t of_queries = p.heads * p.queries, of_keys = p.kv_heads * p.keys;
    const int64_t given = p.batch * (of_queries + of_keys) * (p.dim + p.value_dim) * size_of(p.q.dtype);
    return given > kSmallSums ? given : kSmallSums;
}

template <class Kind>
int backward(const Given& g) {
    const kpt_attention& p = g.forward;
    const int64_t tiles = (p.queries + kTileQueries - 1) / kTileQueries, groups = p.heads / p.kv_heads;
    const int64_t heads = p.batch * p.kv_heads, items = groups * tiles;
    int threads = threads_for(p.batch * p.heads * p.queries * p.keys * (p.dim + p.value_dim), p.threads);
    // Where heads are few, tiles of each are dealt to several tasks, whose sums are added.
    int64_t parts = threads == 1 || heads >= 4 * threads ? 1 : (4 * threads + heads - 1) / heads;
    if (heads % threads == 0) parts = 1;
    if (parts > items) parts = items > 0 ? items : 1;
    const int64_t pitch = round_up(p.dim, kPanel), value_pitch = round_up(p.value_dim, kPanel);
    // Rows of keys that are filled up are written too, as zeros.
    const int64_t keys = round_up(p.keys, kAtOnce<Kind>);
    const int64_t sums_size = keys * (pitch + value_pitch), sums_bytes = sums_size * static_cast<int64_t>(sizeof(float));
    // Several tasks for each thread balance them; where their sums would outgrow the tensors, one has to do.
    if (const int64_t of_a_part = heads * sums_bytes; parts > 1 && of_a_part > 0) {
        const int64_t fitting = most_of_sums(p) / of_a_part, least = (threads + heads - 1) / heads;
        const int64_t most = fitting > least ? fitting : least;
        if (parts > most) parts = most;
    }
    if (heads > 0 && heads * parts < threads) threads = static_cast<int>(heads * parts);
    const int64_t places = parts == 1 ? threads : heads * parts;
    const int64_t size = round_up(Tile<Kind>(g, Room(nullptr)).size(), 4096);
    const Scratch space(size * threads), summed(places * sums_bytes);
    if (space.get() == nullptr || summed.get() == nullptr) return KPT_NO_MEMORY;
    float* all_sums = static_cast<float*>(summed.get());
    const auto write = [&](int64_t head, Span some, const float* sums) {
        if (some.begin >= some.end) return;
        with_float_type(p.q.dtype, [&](auto type) {
            using T = decltype(type);
            const int64_t b = head / p.kv_heads, h = head % p.kv_heads;
            if (g.grad_k.data != nullptr) {
                sum_parts<T>(g.grad_k, b, h, some, p.dim, pitch, sums, parts, sums_size, p.scale);
            }
            if (g.grad_v.data != nullptr) {
                sum_parts<T>(g.grad_v, b, h, some, p.value_dim, value_pitch, sums + keys * pitch, parts, sums_size, 1.0f);
            }
        });
    };
    Tasks work, writing;
    parallel(threads, [&](int rank) {
        [[maybe_unused]] const typename Kind::InUse in_use;
        Tile<Kind> tile(g, Room(static_cast<char*>(space.get()) + rank * size));
        work.all(heads * parts, [&](int64_t task) {
            const int64_t head = task / parts, part = task % parts;
            float* sums = all_sums + (parts == 1 ? rank : task) * sums_size;
            memset(sums, 0, sums_size * sizeof(float));
            for (int64_t item = part; item < items; item += parts) {
                const int64_t number = tiles - 1 - item % tiles, of_queries = head % p.kv_heads * groups + item / tiles;
                tile.run(
                    head / p.kv_heads, of_queries, number * kTileQueries, g.grad_k.data != nullptr ? sums : nullptr,
                    g.grad_v.data != nullptr ? sums + keys * pitch : nullptr);
            }
            if (parts == 1) write(head, {0, p.keys}, sums);
        });
        if (parts == 1) return;
        constexpr int64_t step = 512;
        const int64_t steps = (p.keys + step - 1) / step;
        writing.all(heads * steps, [&](int64_t task) {
            const int64_t head = task / steps, from = task % steps * step;
            write(head, {from, from + step < p.keys ? from + step : p.keys}, all_sums + head * parts * sums_size);
        });
    });
    return KPT_OK;
}

}  // namespace

extern "C" int kpt_attention_backward(const struct kpt_attention_backward* given) {
    return with_kind(given->forward.q.dtype, [&](auto kind) { return backward<decltype(kind)>(*given); });
}
