// moe.top_k_gating and its backward: tokens share nothing, each is one thread's.
#include "gating.h"

#include "activation.h"
#include "parallel.h"
#include "scratch.h"

namespace kpt {
namespace {

using Arguments = struct kpt_top_k_gating;

// How scores are weighed. Without a correction bias the highest of all is chosen, so the floor of the sum does not
// count, and a softmax that is renormalised is one over the chosen alone.
struct Rule {
    int score;
    bool renormalize;
};

Rule rule_of(const Arguments& args) {
    const bool of_chosen = args.score == KPT_SOFTMAX && args.renormalize && args.correction_bias == nullptr;
    const int score = of_chosen ? int{KPT_SOFTMAX_AFTER} : args.score;
    return {score, args.renormalize && score != KPT_SOFTMAX_AFTER};
}

constexpr float floor_of_sum = 1e-20f;

// Room for W tokens. What few numbers each has is stored with a lane for each token: whole vectors, no sums over lanes.
struct Room {
    float* values;     // [value_rows, experts in whole blocks]
    float* keys;       // [experts in whole blocks]
    float* group_keys; // [groups in whole blocks]
    int64_t* groups;   // [groups in whole blocks]
    vf* maxima;        // [blocks of experts]
    vf* scores;        // [top_k]
    vf* grads;         // [top_k]

    static int64_t bytes(const Arguments& args, int value_rows) {
        const int64_t experts = blocks_of(args.experts), groups = blocks_of(args.num_groups);
        const int64_t blocks = (value_rows + 1) * experts + 3 * groups;
        return (blocks * block_size + (experts + 2 * args.top_k) * W) * 4;
    }

    Room(const Arguments& args, int value_rows, void* memory) {
        const int64_t experts = blocks_of(args.experts), groups_size = blocks_of(args.num_groups) * block_size;
        values = static_cast<float*>(memory);
        keys = values + value_rows * experts * block_size;
        group_keys = keys + experts * block_size;
        groups = reinterpret_cast<int64_t*>(group_keys + groups_size);
        maxima = reinterpret_cast<vf*>(groups + groups_size);
        scores = maxima + experts;
        grads = scores + args.top_k;
    }
};

// `x` in the first `count` lanes, `removed` in the rest.
KPT_INLINE vf first_lanes(vf x, int64_t count) {
    return count >= W ? x : select(lane_numbers() < static_cast<int32_t>(count), x, splat(removed));
}

// Turn logits, `removed` after the last one, into softmax's numerators; their sum.
KPT_INLINE float exponentiate(float* values, int64_t count) {
    vf most = splat(removed), sum{};
    for (int64_t i = 0; i < count; i += W) most = larger(most, load(values + i));
    most = largest(most);
    for (int64_t i = 0; i < count; i += W) {
        const vf numerator = exp(load(values + i) - most);
        store(values + i, numerator);
        sum += numerator;
    }
    return sum_of(sum);
}

// How good a group is: its best key, and with a correction bias (DeepSeek-V3) the second best added.
KPT_INLINE float judge_group(const float* keys, int64_t size, bool best_two) {
    vf first = splat(removed), second = first;
    for (int64_t i = 0; i < size; i += W) {
        const vf x = first_lanes(load(keys + i, size - i), size - i);
        second = larger(second, smaller(first, x));
        first = larger(first, x);
    }
    const vf best = largest(first);
    if (!best_two || size == 1) return best[0];
    const vi lane_of_best = splat_int(__builtin_ctz(equal_lanes(first, best)));
    const vf others = select(lane_numbers() == lane_of_best, second, first);
    return key_of(best + largest(others))[0];
}

void keep_best_groups(const Arguments& args, const Room& room) {
    const int64_t size = args.experts / args.num_groups, blocks = blocks_of(args.num_groups);
    for (int64_t g = 0; g < blocks * block_size; g++) {
        room.group_keys[g] = g < args.num_groups
            ? judge_group(room.keys + g * size, size, args.correction_bias != nullptr) : removed;
    }
    choose_highest(room.group_keys, blocks, room.maxima, args.top_groups, room.groups);
    for (int64_t g = 0; g < args.num_groups; g++) room.group_keys[g] = 0.0f;
    for (int64_t j = 0; j < args.top_groups; j++) room.group_keys[room.groups[j]] = 1.0f;
    for (int64_t g = 0; g < args.num_groups; g++) {
        if (room.group_keys[g] == 0.0f) {
            for (int64_t e = g * size; e < (g + 1) * size; e++) room.keys[e] = removed;
        }
    }
}

// Choose one token's experts and put what they are weighed by into its lane: logits, or with softmax the scores.
template <class T>
KPT_INLINE void choose_experts(const Arguments& args, Rule rule, int64_t token, int lane, const Room& room) {
    const T* logits = static_cast<const T*>(args.logits.data) + token * args.logits.stride;
    const int64_t experts = args.experts, blocks = blocks_of(experts);
    for (int64_t e = 0; e < blocks * block_size; e += W) {
        const int64_t count = experts - e;
        vf x = splat(removed), key = x;
        if (count > 0) {
            x = first_lanes(load(logits + e, count), count);
            key = first_lanes(key_of(x), count);
        }
        store(room.values + e, x);
        store(room.keys + e, key);
    }
    const float factor = rule.score == KPT_SOFTMAX ? 1.0f / exponentiate(room.values, experts) : 1.0f;
    if (args.correction_bias != nullptr) {
        for (int64_t e = 0; e < experts; e += W) {
            vf score = load(room.values + e) * factor;
            if (rule.score == KPT_SIGMOID) score = sigmoid(score);
            const vf key = key_of(score + load(args.correction_bias + e, experts - e));
            store(room.keys + e, first_lanes(key, experts - e));
        }
    }
    if (args.num_groups > args.top_groups) keep_best_groups(args, room);
    int64_t* const index = args.index + token * args.top_k;
    choose_highest(room.keys, blocks, room.maxima, args.top_k, index);
    for (int64_t j = 0; j < args.top_k; j++) room.scores[j][lane] = room.values[index[j]] * factor;
}

// What `choose_experts` leaves becomes scores.
KPT_INLINE void finish_scores(int score, vf* scores, int64_t top_k) {
    if (score == KPT_SIGMOID) {
        for (int64_t j = 0; j < top_k; j++) scores[j] = sigmoid(scores[j]);
    } else if (score == KPT_SOFTMAX_AFTER) {
        vf most = scores[0], sum{};
        for (int64_t j = 1; j < top_k; j++) most = larger(most, scores[j]);
        for (int64_t j = 0; j < top_k; j++) sum += scores[j] = exp(scores[j] - most);
        for (int64_t j = 0; j < top_k; j++) scores[j] /= sum;
    }
}

// What scores are divided by.
KPT_INLINE vf total_of(Rule rule, const vf* scores, int64_t top_k) {
    if (!rule.renormalize) return splat(1.0f);
    vf sum{};
    for (int64_t j = 0; j < top_k; j++) sum += scores[j];
    return sum + floor_of_sum;
}

template <class T>
void gate(const Arguments& args, Rule rule, int64_t first, int count, const Room& room) {
    const int64_t top_k = args.top_k;
    for (int64_t j = 0; j < top_k; j++) room.scores[j] = vf{};
    for (int lane = 0; lane < count; lane++) choose_experts<T>(args, rule, first + lane, lane, room);
    finish_scores(rule.score, room.scores, top_k);
    const vf total = total_of(rule, room.scores, top_k);
    for (int64_t j = 0; j < top_k; j++) room.scores[j] = room.scores[j] / total * args.scale;
    for (int lane = 0; lane < count; lane++) {
        float* const weights = args.weights + (first + lane) * top_k;
        for (int64_t j = 0; j < top_k; j++) weights[j] = room.scores[j][lane];
    }
}

template <class T>
void gate_backward(const struct kpt_top_k_gating_backward& args, Rule rule, int64_t first, int count,
                   const Room& room) {
    const Arguments& forward = args.forward;
    const int64_t experts = forward.experts, top_k = forward.top_k;
    const int64_t row = blocks_of(experts) * block_size;
    const bool over_all = rule.score == KPT_SOFTMAX;
    vf factors = splat(1.0f);
    for (int64_t j = 0; j < top_k; j++) room.scores[j] = room.grads[j] = vf{};
    for (int lane = 0; lane < count; lane++) {
        const T* const logits = static_cast<const T*>(forward.logits.data) + (first + lane) * forward.logits.stride;
        const int64_t* const index = forward.index + (first + lane) * top_k;
        const float* const grad = args.grad + (first + lane) * top_k;
        float* const values = room.values + lane * row;
        if (over_all) {
            for (int64_t e = 0; e < experts; e += W) {
                store(values + e, first_lanes(load(logits + e, experts - e), experts - e));
            }
            factors[lane] = 1.0f / exponentiate(values, experts);
        }
        for (int64_t j = 0; j < top_k; j++) {
            room.scores[j][lane] = over_all ? values[index[j]] * factors[lane] : widen(logits[index[j]]);
            room.grads[j][lane] = grad[j] * forward.scale;
        }
    }
    finish_scores(rule.score, room.scores, top_k);
    const vf total = total_of(rule, room.scores, top_k);
    // Where the weights sum to one whatever the logits are, what their gradients have in common changes nothing; taken away,
    // it leaves no rounding error in its place.
    const vi always = splat_int(rule.score == KPT_SOFTMAX_AFTER || (over_all && top_k == experts) ? -1 : 0);
    const vi constant_sum = always | (rule.renormalize ? total > 1e-12f : vi{});
    const vf common = select(constant_sum, room.grads[0], vf{});
    for (int64_t j = 0; j < top_k; j++) room.grads[j] -= common;
    vf mean{};
    // Shares before products, so that the gradient of a single weight, always 1, is 0.
    for (int64_t j = 0; j < top_k; j++) mean += room.scores[j] / total * room.grads[j];
    if (rule.renormalize) {
        for (int64_t j = 0; j < top_k; j++) room.grads[j] = (room.grads[j] - mean) / total;
        // All that is left of the sum of gradient times score: the floor's part.
        mean *= floor_of_sum / total;
    }
    for (int64_t j = 0; j < top_k; j++) {
        const vf score = room.scores[j], grad = room.grads[j];
        room.scores[j] = score * (rule.score == KPT_SIGMOID ? grad * (1.0f - score) : grad - mean);
    }
    for (int lane = 0; lane < count; lane++) {
        T* const out = static_cast<T*>(args.grad_logits.data) + (first + lane) * args.grad_logits.stride;
        const int64_t* const index = forward.index + (first + lane) * top_k;
        if (over_all) {
            const float* const values = room.values + lane * row;
            const float of_all = -mean[lane] * factors[lane];
            for (int64_t e = 0; e < experts; e += W) store(out + e, load(values + e) * of_all, experts - e);
        } else {
            memset(out, 0, experts * sizeof(T));
        }
        for (int64_t j = 0; j < top_k; j++) narrow(room.scores[j][lane], out + index[j]);
    }
}

// Run `body(first, count, room)` for all tokens, up to W at a time.
template <class Body>
int for_all_tokens(const Arguments& args, int value_rows, Body&& body) {
    // Starting threads takes as long as so many logits.
    constexpr int64_t logits_of_thread = 16384;
    const int64_t useful = 1 + args.tokens * args.experts / logits_of_thread;
    const int threads = static_cast<int>(useful < args.threads ? useful : args.threads);
    const int64_t bytes = (Room::bytes(args, value_rows) + 63) / 64 * 64;
    Scratch scratch(bytes * threads);
    if (scratch.get() == nullptr) return KPT_NO_MEMORY;
    Tasks tasks;
    parallel(threads, [&](int rank) {
        const Room room(args, value_rows, static_cast<char*>(scratch.get()) + rank * bytes);
        // Some for each thread, and not so short that taking them counts.
        const int64_t vectors = args.tokens / (4 * threads * W), most = vectors < 8 ? vectors : 8;
        tasks.in_steps(args.tokens, (most > 1 ? most : 1) * W, [&](int64_t begin, int64_t end) {
            for (int64_t first = begin; first < end; first += W) {
                body(first, static_cast<int>(end - first < W ? end - first : W), room);
            }
        });
    });
    return KPT_OK;
}

}  // namespace
}  // namespace kpt

int kpt_top_k_gating(const struct kpt_top_k_gating* args) {
    const kpt::Rule rule = kpt::rule_of(*args);
    int status = KPT_OK;
    kpt::with_float_type(args->logits.dtype, [&](auto type) {
        status = kpt::for_all_tokens(*args, 1, [&](int64_t first, int count, const kpt::Room& room) {
            kpt::gate<decltype(type)>(*args, rule, first, count, room);
        });
    });
    return status;
}

int kpt_top_k_gating_backward(const struct kpt_top_k_gating_backward* args) {
    const kpt::Rule rule = kpt::rule_of(args->forward);
    int status = KPT_OK;
    kpt::with_float_type(args->forward.logits.dtype, [&](auto type) {
        status = kpt::for_all_tokens(args->forward, kpt::W, [&](int64_t first, int count, const kpt::Room& room) {
            kpt::gate_backward<decltype(type)>(*args, rule, first, count, room);
        });
    });
    return status;
}
