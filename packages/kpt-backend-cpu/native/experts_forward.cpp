// moe.experts for many rows: gate and up with the activation on the sums, down with the routing weight on the sums, and the
// sum of each token's rows. The tokens' rows are gathered as they are packed, and no result is scattered by adding.
#include "experts.h"

using namespace kpt;

namespace {

// Biases of a task's columns, in the order of its sums.
void spread_bias(const kpt_rows& bias, int64_t expert, const Columns& columns, float* out) {
    memset(out, 0, columns.width() * sizeof(float));
    if (bias.data == nullptr) return;
    with_float_type(bias.dtype, [&](auto type) {
        using T = decltype(type);
        const T* own = row_of<T>(bias, expert);
        for (int64_t j = 0; j < columns.count; j++) {
            out[j] = widen(own[columns.first + j]);
            if (columns.second >= 0) out[columns.padded() + j] = widen(own[columns.second + j]);
        }
    });
}

// The activation of a task's sums, for `count` columns from `first` on, and the pre-activation if it is kept.
template <class T>
void activate_sums(
    const struct kpt_experts& p, const float* bias, int64_t row, int64_t rows, const Columns& columns, int64_t first,
    int64_t count, const float* sums, T* activated) {
    const bool interleaved = p.act.interleaved && is_gated(p);
    with_activation(p.act, [&](const auto& act) {
        for (int64_t r = 0; r < rows; r++) {
            const float* own = sums + r * columns.pitch();
            if (p.h.data != nullptr) {
                store_run(row_of<T>(p.h, row + r, columns.first), own, columns.count);
                if (columns.second >= 0) {
                    store_run(row_of<T>(p.h, row + r, columns.second), own + columns.padded(), columns.count);
                }
            }
            T* out = activated + r * p.intermediate + first;
            for (int64_t j = 0; j < count; j += W) {
                vf gate, up = {};
                if (interleaved) {
                    const vf low = load(own + 2 * j) + load(bias + 2 * j);
                    const vf high = load(own + 2 * j + W) + load(bias + 2 * j + W);
                    deinterleave(low, high, gate, up);
                } else {
                    gate = load(own + j) + load(bias + j);
                    if (columns.second >= 0) up = load(own + columns.padded() + j) + load(bias + columns.padded() + j);
                }
                store(out + j, act.value(gate, up), count - j);
            }
        }
    });
}

// Weighted rows go where their pair is, so that a token's lie together.
template <class T>
void weigh_sums(
    const struct kpt_experts& p, const float* bias, int64_t row, int64_t rows, const Columns& columns, const float* sums,
    T* weighted) {
    for (int64_t r = 0; r < rows; r++) {
        const int64_t pair = p.order[row + r];
        const float weight = weight_of(p, pair);
        const float* own = sums + r * columns.pitch();
        T* out = weighted + pair * p.hidden + columns.first;
        for (int64_t j = 0; j < columns.count; j += W) {
            store(out + j, (load(own + j) + load(bias + j)) * weight, columns.count - j);
        }
    }
}

template <class T>
int forward(const struct kpt_experts& p) {
    const int64_t pairs = pairs_of(p), taken = rows_here(p);
    const int threads = threads_for(multiplications_of(p), p.threads);
    const int64_t size = Block::bytes(p.hidden > p.intermediate ? p.hidden : p.intermediate);
    const Scratch listed(most_row_blocks(pairs, p.experts) * static_cast<int64_t>(sizeof(RowBlock)));
    if (listed.get() == nullptr) return KPT_NO_MEMORY;
    RowBlock* blocks = static_cast<RowBlock*>(listed.get());
    const int64_t at_once = columns_at_once(p.hidden);
    const ColumnBlocks wide = ColumnBlocks::of(p.intermediate, is_gated(p) ? at_once / 2 : at_once);
    const ColumnBlocks narrow = ColumnBlocks::of(p.hidden, columns_at_once(p.intermediate));
    const int64_t fewest = wide.count < narrow.count ? wide.count : narrow.count;
    const int64_t count = cut_rows(p.offsets, p.experts, fewest, threads, blocks);
    const Groups groups{blocks, count, p.intermediate * static_cast<int64_t>(sizeof(T)), fewest, threads, false};
    Layout layout;
    const auto tokens_at = layout.add<int32_t>(pairs);
    const auto activated_at = layout.add<T>(groups.most_rows() * p.intermediate);
    const auto weighted_at = layout.add<T>(pairs * p.hidden);
    const auto spaces_at = layout.add<char>(size * threads);
    const Scratch scratch(layout.size());
    if (scratch.get() == nullptr) return KPT_NO_MEMORY;
    int32_t* tokens = tokens_at.in(scratch);
    T *activated = activated_at.in(scratch), *weighted = weighted_at.in(scratch);

    for (int64_t row = 0; row < taken; row++) tokens[row] = static_cast<int32_t>(p.order[row] / p.top_k);
    const Factor of_tokens = factor_of_rows(p.x, tokens);
    const Factor of_activated{activated, p.intermediate, nullptr, p.x.dtype, true, {}};
    if (p.h.data != nullptr) zero_rows(p.h, taken, pairs, p.width);
    Tasks upwards, downwards, summing;
    parallel(threads, [&](int rank) {
        const Block block = Block::at(spaces_at.in(scratch), size, rank);
        int64_t own_up = -1, own_down = -1;
        for (int64_t begin = 0, end; begin < count; begin = end) {
            end = groups.end(begin);
            // The row that is the activation's first.
            const int64_t base = blocks[begin].first;
            upwards.up_to(end * wide.count, own_up, [&](int64_t task) {
                const RowBlock& rows = blocks[task / wide.count];
                const int64_t first = wide.first(task % wide.count), own = wide.size(task % wide.count);
                const Columns columns = gate_and_up(p, first, own);
                float bias[kColumns];
                spread_bias(p.up_bias, rows.expert, columns, bias);
                const auto finish = [&](int64_t row, int64_t many, const float* sums) {
                    activate_sums(p, bias, row, many, columns, first, own, sums, activated + (row - base) * p.intermediate);
                };
                multiply_matrix(
                    block, of_tokens, rows.first, rows.rows, p.up, rows.expert, true, columns, p.hidden, finish);
            });
            downwards.up_to(end * narrow.count, own_down, [&](int64_t task) {
                const RowBlock& rows = blocks[task / narrow.count];
                const Columns columns{narrow.first(task % narrow.count), narrow.size(task % narrow.count)};
                float bias[kColumns];
                spread_bias(p.down_bias, rows.expert, columns, bias);
                const auto finish = [&](int64_t row, int64_t many, const float* sums) {
                    weigh_sums(p, bias, base + row, many, columns, sums, weighted);
                };
                multiply_matrix(
                    block, of_activated, rows.first - base, rows.rows, p.down, rows.expert, true, columns, p.intermediate,
                    finish);
            });
        }
        summing.in_steps(p.tokens, tokens_of_task, [&](int64_t begin, int64_t end) {
            sum_pairs(p, weighted, p.out, begin, end);
        });
    });
    return KPT_OK;
}

}  // namespace

extern "C" int kpt_experts_forward(const struct kpt_experts* given) {
    int code = KPT_OK;
    with_float_type(given->x.dtype, [&](auto type) { code = forward<decltype(type)>(*given); });
    return code;
}
