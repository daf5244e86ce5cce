// attention.dense: each tile of queries goes through the blocks of keys that it sees, with a running softmax.
#include "attention.h"

using namespace kpt;

namespace {

// Sums that exponentials of neighbouring keys go to: one alone would round as often as there are keys.
constexpr int kChains = 4;

template <class Kind>
class Tile {
public:
    // Distance of queries whose weights lie along the keys.
    static constexpr int64_t kLine = kBlockKeys / Kind::per_slot + 16;

    Tile(const kpt_attention& p, Room room)
        : p_(p), pitch_(round_up(p.value_dim, kPanel)), depth_(depth_of<Kind>(p.dim)), mask_(p, room),
          added_(p, room), dropout_(p, room),
          q_(room.take<slot>(kTileQueries * depth_)), k_(room.take<slot>(kBlockKeys * kPitch)),
          v_(room.take<slot>(depth_of<Kind>(kBlockKeys) * pitch_)), scores_(room.take<float>(kBlockKeys * kPanel)),
          weights_(Kind::per_slot == 1 ? reinterpret_cast<slot*>(scores_) : room.take<slot>(kBlockKeys / 2 * kPanel)),
          lines_(room.take<slot>(Kind::step == 1 ? 0 : kPanel * kLine)), out_(room.take<float>(kTileQueries * pitch_)), largest_(room.take<float>(kTileQueries)),
          total_(room.take<float>(kTileQueries)), size_(room.size()) {}
    int64_t size() const { return size_; }

    void run(int64_t batch, int64_t head, int64_t first) {
        const int64_t rows = p_.queries - first < kTileQueries ? p_.queries - first : kTileQueries;
        const int64_t of_keys = head / (p_.heads / p_.kv_heads);
        mask_.look(batch, head, first);
        added_.look(batch, head, first);
        dropout_.look(batch, head, first);
        pack_panels<Kind>(factor_of(p_.q, batch, head, true), first, rows, 0, p_.dim, q_);
        memset(out_, 0, kTileQueries * pitch_ * sizeof(float));
        for (int64_t q = 0; q < kTileQueries; q++) {
            largest_[q] = p_.sinks != nullptr ? p_.sinks[head] : -__builtin_inff();
            total_[q] = largest_[q] > -__builtin_inff() ? 1.0f : 0.0f;
        }
        const Factor k = factor_of(p_.k, batch, of_keys, true), v = factor_of(p_.v, batch, of_keys, false);
        const int64_t panels = (rows + kPanel - 1) / kPanel;
        for (int64_t block = mask_.blocks().begin; block < mask_.blocks().end; block++) {
            bool packed = false;
            for (int64_t panel = 0; panel < panels; panel++) {
                if (mask_.state(block, panel) == kDead) continue;
                if (!packed) pack_block(k, v, block);
                packed = true;
                add_block(block, panel);
            }
        }
        with_float_type(p_.out.dtype, [&](auto type) { finish<decltype(type)>(batch, head, first, rows); });
    }

private:
    void pack_block(const Factor& k, const Factor& v, int64_t block) {
        const int64_t begin = block * kBlockKeys, keys = mask_.end_of(block) - begin;
        pack_lines<Kind>(k, begin, keys, 0, p_.dim, k_);
        pack_panels<Kind>(v, 0, p_.value_dim, begin, keys, v_);
        v_depth_ = depth_of<Kind>(keys);
        // Nothing times NaN is NaN.
        if (any_wild<Kind>(v_, v_depth_ * pitch_)) mask_.template zero_unseen<Kind>(block, v_, v_depth_, p_.value_dim);
    }

    void add_block(int64_t block, int64_t panel) {
        const Span span = span_of<Kind>(mask_, block, panel);
        float* scores = scores_ + span.begin * kPanel;
        multiply_lines<Kind, kPitch>(
            k_ + span.begin * kPitch, span.end - span.begin, q_ + panel * kPanel * depth_, depth_, kPanel, depth_, scores,
            kPanel, false);
        float *largest = largest_ + panel * kPanel, *total = total_ + panel * kPanel, *out = out_ + panel * kPanel * pitch_;
        vf most[2] = {load(largest), load(largest + W)};
        const vf before[2] = {most[0], most[1]};
        finish_scores(p_, mask_, added_, block, panel, span, scores_, most);
        vf base[2];
        vf sums[2][kChains] = {};
        float fading[kPanel];
        for (int half = 0; half < 2; half++) {
            store(largest + half * W, most[half]);
            base[half] = larger(most[half], splat(kLowest));
            const vf fade = exp_of_loss(before[half] - base[half]);
            store(fading + half * W, fade);
            sums[half][0] = load(total + half * W) * fade;
        }
        if (any_of((before[0] < most[0]) | (before[1] < most[1]))) {
            for (int64_t lane = 0; lane < kPanel; lane++) {
                float* own = out + lane * pitch_;
                if (fading[lane] == 1.0f) continue;
                for (int64_t j = 0; j < pitch_; j += W) store(own + j, load(own + j) * fading[lane]);
            }
        }
        // What is past the span stays out of the sums.
        const Span filled{span.begin, round_up(span.end, kAtOnce<Kind>)};
        for (int64_t key = span.end; key < filled.end; key++) {
            for (int64_t i = 0; i < kPanel; i++) scores_[key * kPanel + i] = -__builtin_inff();
        }
        const int64_t begin = block * kBlockKeys;
        if (dropout_.any()) {
            weigh_all(filled, base, sums, [&](vf weight, int64_t key, int half) {
                return Dropout::kept(dropout_, weight, panel * kPanel + half * W, begin + key);
            });
        } else {
            weigh_all(filled, base, sums, [](vf weight, int64_t, int) { return weight; });
        }
        for (int half = 0; half < 2; half++) {
            vf all = sums[half][0];
            for (int j = 1; j < kChains; j++) all += sums[half][j];
            store(total + half * W, all);
        }
        const int64_t from = filled.begin / Kind::per_slot * kPanel, depth = (filled.end - filled.begin) / Kind::per_slot;
        if constexpr (Kind::step == 1) {
            multiply_block<Kind, 1, kPanel>(weights_ + from, kPanel, v_ + from, v_depth_, pitch_, depth, out, pitch_, true);
        } else {
            turn<kLine>(weights_ + from, kPanel, kPanel, depth, lines_);
            multiply_lines<Kind, kLine>(lines_, kPanel, v_ + from, v_depth_, pitch_, depth, out, pitch_, true);
        }
    }

    template <class Keep>
    __attribute__((always_inline)) inline void weigh_all(Span span, const vf* base, vf (*sums)[kChains], Keep&& keep) {
        int64_t key = span.begin;
        for (; key + kChains < span.end; key += kChains) {
            for (int half = 0; half < 2; half++) {
                for (int j = 0; j < kChains; j += Kind::per_slot) weigh(key + j, half, base[half], &sums[half][j], keep);
            }
        }
        for (; key < span.end; key += Kind::per_slot) {
            for (int half = 0; half < 2; half++) weigh(key, half, base[half], sums[half], keep);
        }
    }

    // Make scores of a slot's keys weights, and add these to as many sums, before some are dropped.
    template <class Keep>
    __attribute__((always_inline)) inline void weigh(int64_t key, int half, vf base, vf* sums, Keep&& keep) {
        vf each[Kind::per_slot];
        for (int j = 0; j < Kind::per_slot; j++) {
            each[j] = exp_of_loss(load(scores_ + (key + j) * kPanel + half * W) - base);
            sums[j] += each[j];
            each[j] = keep(each[j], key + j, half);
        }
        store_slots<Kind>(weights_ + key / Kind::per_slot * kPanel + half * W, slots_of<Kind>(each));
    }

    template <class T>
    void finish(int64_t batch, int64_t head, int64_t first, int64_t rows) {
        const int64_t at = (batch * p_.heads + head) * p_.queries + first;
        for (int64_t q = 0; q < rows; q++) {
            T* to = token_of<T>(p_.out, batch, head, first + q);
            const bool dead = total_[q] == 0.0f;
            const float total = dead ? 1.0f : total_[q], largest = largest_[q] > kLowest ? largest_[q] : kLowest;
            for (int64_t j = 0; j < p_.value_dim; j += W) {
                vf value = dead ? vf{} : load(out_ + q * pitch_ + j) / total;
                if (dropout_.any()) value *= p_.drop_scale;
                store(to + j, value, p_.value_dim - j);
            }
            p_.largest[at + q] = largest;
            p_.total[at + q] = total;
            if (p_.lse != nullptr) p_.lse[at + q] = dead ? -__builtin_inff() : largest + __builtin_logf(total);
        }
    }

    const kpt_attention& p_;
    const int64_t pitch_, depth_;
    Mask mask_;
    Added added_;
    Dropout dropout_;
    slot *q_, *k_, *v_;
    float* scores_;
    slot *weights_, *lines_;
    float *out_, *largest_, *total_;
    int64_t size_, v_depth_ = 0;
};

template <class Kind>
int forward(const kpt_attention& p) {
    const int64_t tiles = (p.queries + kTileQueries - 1) / kTileQueries, heads = p.batch * p.heads;
    const int threads = threads_for(heads * p.queries * p.keys * (p.dim + p.value_dim), p.threads);
    const int64_t size = round_up(Tile<Kind>(p, Room(nullptr)).size(), 4096);
    const Scratch space(size * threads);
    if (space.get() == nullptr) return KPT_NO_MEMORY;
    Tasks work;
    parallel(threads, [&](int rank) {
        [[maybe_unused]] const typename Kind::InUse in_use;
        Tile<Kind> tile(p, Room(static_cast<char*>(space.get()) + rank * size));
        work.all(heads * tiles, [&](int64_t task) {
            // The last tiles of a head first: under causality they take longest.
            const int64_t head = task / tiles, number = tiles - 1 - task % tiles;
            tile.run(head / p.heads, head % p.heads, number * kTileQueries);
        });
    });
    return KPT_OK;
}

}  // namespace

extern "C" int kpt_attention_forward(const struct kpt_attention* given) {
    return with_kind(given->q.dtype, [&](auto kind) { return forward<decltype(kind)>(*given); });
}
