// moe.experts for few tokens: both products, the activation and the weighted sum in one parallel region.
#include "activation.h"
#include "dot.h"
#include "routing.h"
#include "scratch.h"

namespace kpt {

namespace {

constexpr int64_t group = Staging::group;

// What a thread keeps of its own: results of gate and up (or of down), and two rows of biases.
struct Buffers {
    float* results;
    float* biases;
};

struct Decode {
    const kpt_experts& args;
    int64_t pairs;
    bool gated;
    Staging of_x, of_act;
    char* x;              // staged, [tokens]
    char* act;            // staged, [pairs], in sorted order
    float* sums;          // [tokens, hidden]
    int32_t* order;       // [pairs], those of an expert here
    const void** x_rows;  // [pairs]
    const void** act_rows;
    Active* active;
    int64_t num_active;
};

// Sort the pairs by expert; `ends` has an entry for each expert.
void sort_pairs(Decode& d, int64_t* ends) {
    const kpt_experts& args = d.args;
    for (int64_t e = 0; e < args.experts; e++) ends[e] = 0;
    for (int64_t pair = 0; pair < d.pairs; pair++) {
        const int64_t expert = expert_of(args, pair);
        if (expert >= 0) ends[expert]++;
    }
    int64_t first = 0;
    for (int64_t e = 0; e < args.experts; e++) {
        const int64_t rows = ends[e];
        if (rows > 0) d.active[d.num_active++] = Active{e, first, rows};
        ends[e] = first;
        first += rows;
    }
    for (int64_t pair = 0; pair < d.pairs; pair++) {
        const int64_t expert = expert_of(args, pair);
        if (expert < 0) continue;
        const int64_t at = ends[expert]++;
        d.order[at] = static_cast<int32_t>(pair);
        d.x_rows[at] = d.x + pair / args.top_k * d.of_x.bytes();
        d.act_rows[at] = d.act + at * d.of_act.bytes();
    }
}

const char* at(const kpt_rows& rows, int64_t row, int64_t column) {
    return static_cast<const char*>(rows.data) + (row * rows.stride + column) * size_of(rows.dtype);
}

// Stage groups of 64 numbers of x, counted over all tokens.
void stage_x(const Decode& d, int64_t begin, int64_t end) {
    const kpt_experts& args = d.args;
    const int64_t groups = d.of_x.padded() / group;
    for (int64_t i = begin; i < end; i++) {
        const int64_t token = i / groups, k = i % groups * group;
        const int64_t count = args.hidden - k < group ? args.hidden - k : group;
        float values[group];
        widen_all(at(args.x, token, k), args.x.dtype, count, values);
        stage(d.of_x, values, k, count, d.x + token * d.of_x.bytes());
    }
}

// The biases of `count` columns, or zeros.
void read_bias(const kpt_rows& bias, int64_t expert, int64_t column, int64_t count, float* out) {
    if (bias.data != nullptr) widen_all(at(bias, expert, column), bias.dtype, count, out);
    else memset(out, 0, count * sizeof(float));
}

// The activation of `count` pre-activations, at most a group of them. `up` is unused where there is no gate.
void activate(
    const kpt_activation_settings& settings, const float* gate, const float* gate_bias, const float* up,
    const float* up_bias, int64_t count, float* out) {
    with_activation(settings, [&](auto act) {
        for (int64_t i = 0; i < count; i += W) {
            const vf g = load(gate + i, count - i) + load(gate_bias + i, count - i);
            const vf u = act.gated ? load(up + i, count - i) + load(up_bias + i, count - i) : vf{};
            store(out + i, act.value(g, u), count - i);
        }
    });
}

// The same where gate and up alternate.
void activate_pairs(
    const kpt_activation_settings& settings, const float* both, const float* bias, int64_t count, float* out) {
    float parts[4][group];
    for (int64_t i = 0; i < count; i++) {
        for (int half = 0; half < 2; half++) {
            parts[half][i] = both[2 * i + half];
            parts[half + 2][i] = bias[2 * i + half];
        }
    }
    activate(settings, parts[0], parts[2], parts[1], parts[3], count, out);
}

// The pre-activations begin..end of an expert, and their activation, staged for the second product.
void activate_part(const Decode& d, const Active& own, int64_t begin, int64_t end, const Buffers& buffers) {
    const kpt_experts& args = d.args;
    const bool interleaved = d.gated && args.act.interleaved;
    const int64_t step = columns_for_rows(own.rows), width = d.gated ? 2 * step : step;
    const auto product = [&](int64_t from, int64_t count, int64_t place) {
        multiply(Product{
            args.up, own.expert, from, from + count, d.of_x, d.x_rows + own.first, own.rows, nullptr, 0,
            buffers.results + place, width});
        read_bias(args.up_bias, own.expert, from, count, buffers.biases + place);
    };
    for (int64_t j = begin; j < end; j += step) {
        const int64_t count = end - j < step ? end - j : step;
        if (interleaved) {
            product(2 * j, 2 * count, 0);
        } else {
            product(j, count, 0);
            if (d.gated) product(args.intermediate + j, count, step);
        }
        for (int64_t m = 0; m < own.rows; m++) {
            const float* h = buffers.results + m * width;
            for (int64_t i = 0; i < count; i += group) {
                const int64_t some = count - i < group ? count - i : group;
                float values[group];
                if (interleaved) {
                    activate_pairs(args.act, h + 2 * i, buffers.biases + 2 * i, some, values);
                } else {
                    activate(
                        args.act, h + i, buffers.biases + i, h + step + i, buffers.biases + step + i, some, values);
                }
                stage(d.of_act, values, j + i, some, d.act + (own.first + m) * d.of_act.bytes());
            }
        }
    }
}

// Add what an expert gives to the columns begin..end, weighted by the routing.
void add_down(const Decode& d, const Active& own, int64_t begin, int64_t end, const Buffers& buffers) {
    const kpt_experts& args = d.args;
    const int64_t step = columns_for_rows(own.rows);
    for (int64_t n = begin; n < end; n += step) {
        const int64_t count = end - n < step ? end - n : step;
        multiply(Product{
            args.down, own.expert, n, n + count, d.of_act, d.act_rows + own.first, own.rows, nullptr, 0,
            buffers.results, step});
        read_bias(args.down_bias, own.expert, n, count, buffers.biases);
        for (int64_t m = 0; m < own.rows; m++) {
            const int64_t pair = d.order[own.first + m];
            const float weight = weight_of(args, pair);
            const float* y = buffers.results + m * step;
            float* sums = d.sums + pair / args.top_k * args.hidden + n;
            for (int64_t i = 0; i < count; i += W) {
                const vf value = load(y + i, count - i) + load(buffers.biases + i, count - i);
                store(sums + i, load(sums + i, count - i) + value * splat(weight), count - i);
            }
        }
    }
}

// The columns begin..end of the result.
void down_and_out(const Decode& d, int64_t begin, int64_t end, const Buffers& buffers) {
    const kpt_experts& args = d.args;
    const int64_t bytes = (end - begin) * static_cast<int64_t>(sizeof(float));
    for (int64_t t = 0; t < args.tokens; t++) memset(d.sums + t * args.hidden + begin, 0, bytes);
    for (int64_t i = 0; i < d.num_active; i++) add_down(d, d.active[i], begin, end, buffers);
    for (int64_t t = 0; t < args.tokens; t++) {
        char* out = static_cast<char*>(args.out.data) + (t * args.out.stride + begin) * size_of(args.out.dtype);
        narrow_all(d.sums + t * args.hidden + begin, end - begin, args.out.dtype, out);
    }
}

}  // namespace

}  // namespace kpt

extern "C" int kpt_experts_decode(const struct kpt_experts* given) {
    using namespace kpt;
    const kpt_experts& args = *given;
    const int64_t pairs = pairs_of(args);
    const Staging of_x = staging_for(args.x.dtype, args.up, args.hidden);
    const Staging of_act = staging_for(args.x.dtype, args.down, args.intermediate);
    const int64_t results = 2 * results_at_once(pairs), biases = 2 * most_columns;  // of gate and up
    Layout layout;
    const auto x = layout.add<char>(args.tokens * of_x.bytes());
    const auto act = layout.add<char>(pairs * of_act.bytes());
    const auto sums = layout.add<float>(args.tokens * args.hidden);
    const auto order = layout.add<int32_t>(pairs);
    const auto x_rows = layout.add<const void*>(pairs), act_rows = layout.add<const void*>(pairs);
    const auto active = layout.add<Active>(args.experts);
    const auto ends = layout.add<int64_t>(args.experts);
    const auto buffers_at = layout.add<float>((results + biases) * args.threads);
    const Scratch scratch(layout.size());
    if (scratch.get() == nullptr) return KPT_NO_MEMORY;
    Decode d{
        args, pairs, is_gated(args), of_x, of_act, x.in(scratch), act.in(scratch), sums.in(scratch), order.in(scratch),
        x_rows.in(scratch), act_rows.in(scratch), active.in(scratch), 0};
    sort_pairs(d, ends.in(scratch));
    const int64_t size = size_of(args.up.dtype), up_columns = is_gated(args) ? 2 : 1;
    const Parts ups(d.active, d.num_active, args.intermediate, up_columns * args.hidden * size, args.threads);
    const int64_t bytes = d.num_active * (args.width + args.intermediate) * args.hidden * size;
    // Of all experts, so that a task is larger than a part.
    const int64_t fair = columns_of_part(args.hidden, int64_t{4} * args.threads), most = 4 * group;
    const int64_t down_columns = fair < most ? fair : most;
    Tasks staging, upwards, downwards;
    parallel(threads_to_read(bytes, args.threads), [&](int rank) {
        float* own = buffers_at.in(scratch) + rank * (results + biases);
        const Buffers buffers{own, own + results};
        staging.in_steps(args.tokens * of_x.padded() / group, 32, [&](int64_t begin, int64_t end) {
            stage_x(d, begin, end);
        });
        ups.run(upwards, [&](const Active& expert, int64_t begin, int64_t end) {
            activate_part(d, expert, begin, end, buffers);
        });
        downwards.in_steps(args.hidden, down_columns, [&](int64_t begin, int64_t end) {
            down_and_out(d, begin, end, buffers);
        });
    });
    return KPT_OK;
}
