// The gradients of moe.experts, from the input and the pre-activation alone. The gradient of a routing weight is the inner
// product of the activation with the gradient behind the down projection (SonicMoE, arXiv:2512.14080).
#include "experts.h"
#include "wgrad.h"

using namespace kpt;

namespace {

KPT_INLINE int64_t most_of(int64_t a, int64_t b, int64_t c) { return a > b ? (a > c ? a : c) : b > c ? b : c; }

// Everything that the tasks of one call share; what is not wanted is null.
template <class T>
struct Backward {
    const struct kpt_experts_backward& given;
    const struct kpt_experts& p;
    int64_t taken;
    const RowBlock* blocks;
    int64_t block_count;
    const int32_t* tokens; // of sorted rows
    T* grad_h;             // [rows, width]
    T* weighted;           // [rows, intermediate], the activation times the routing weight
    float* dots;           // [blocks of columns, rows]
    T* grad_rows;          // [pairs, hidden]
};

// The first `count` numbers of a vector, the rest zero.
KPT_INLINE vf first_of(vf value, int64_t count) {
    for (int i = 0; i < W; i++) {
        if (i >= count) value[i] = 0;
    }
    return value;
}

// With `sums` the gradient behind the down projection before the routing weight: what the activation makes of it.
template <class T>
void differentiate_sums(
    const Backward<T>& b, int64_t expert, int64_t first_row, int64_t rows, const Columns& columns, int64_t column_block,
    const float* sums) {
    const struct kpt_experts& p = b.p;
    const bool gated = is_gated(p), interleaved = p.act.interleaved && gated;
    const int64_t first = columns.first, count = columns.count, of_h = interleaved ? 2 * first : first;
    float gate_bias[kColumns] = {}, up_bias[kColumns] = {};
    if (p.up_bias.data != nullptr) {
        split_gates(row_of<T>(p.up_bias, expert, of_h), gated, interleaved, p.intermediate, count, gate_bias, up_bias);
    }
    with_activation(p.act, [&](const auto& act) {
        float gates[kColumns], ups[kColumns] = {};
        for (int64_t r = 0; r < rows; r++) {
            const int64_t row = first_row + r;
            const float weight = weight_of(p.weights, p.order[row]);
            const float* own = sums + r * columns.width();
            split_gates(row_of<T>(p.h, row, of_h), gated, interleaved, p.intermediate, count, gates, ups);
            vf dot = {};
            for (int64_t j = 0; j < count; j += W) {
                const vf gate = load(gates + j) + load(gate_bias + j), up = load(ups + j) + load(up_bias + j);
                const vf grad = load(own + j), value = act.value(gate, up);
                // Past the last column is what another row left there, which may be anything.
                const int64_t own_columns = count - j;
                dot += own_columns >= W ? grad * value : first_of(grad * value, own_columns);
                if (b.weighted != nullptr) {
                    store(b.weighted + row * p.intermediate + first + j, value * weight, count - j);
                }
                vf grad_gate, grad_up;
                act.slope(grad * weight, gate, up, grad_gate, grad_up);
                store(gates + j, grad_gate);
                store(ups + j, grad_up);
            }
            if (b.dots != nullptr) b.dots[column_block * b.taken + row] = sum_of(dot);
            if (b.grad_h != nullptr) {
                T* to = b.grad_h + row * p.width + of_h;
                join_gates(to, gated, interleaved, p.intermediate, count, gates, ups);
            }
        }
    });
}

// Gradients of the routing weights from their parts, for this thread's share of the pairs.
template <class T>
void store_weight_gradients(const Backward<T>& b, int64_t parts, const Member& member) {
    const struct kpt_experts& p = b.p;
    int64_t begin, end;
    with_float_type(b.given.grad_weights.dtype, [&](auto type) {
        using U = decltype(type);
        U* out = static_cast<U*>(b.given.grad_weights.data);
        member.share(pairs_of(p), 1, begin, end);
        for (int64_t row = begin; row < end; row++) {
            const int64_t pair = p.order[row];
            float sum = 0;
            if (row < b.taken) {
                for (int64_t part = 0; part < parts; part++) sum += b.dots[part * b.taken + row];
            }
            narrow(sum, out + pair);
        }
    });
}

// <grad, bias of the down projection> of each row, as one more part of the inner products.
template <class T>
void dot_with_bias(const Backward<T>& b, int64_t part, const Member& member) {
    const struct kpt_experts& p = b.p;
    for (int64_t i = member.rank; i < b.block_count; i += member.size) {
        const RowBlock& rows = b.blocks[i];
        const T* bias = row_of<T>(p.down_bias, rows.expert);
        for (int64_t row = rows.first; row < rows.first + rows.rows; row++) {
            const T* grad = row_of<T>(b.given.grad, b.tokens[row]);
            vf dot = {};
            for (int64_t j = 0; j < p.hidden; j += W) dot += load(grad + j, p.hidden - j) * load(bias + j, p.hidden - j);
            b.dots[part * b.taken + row] = sum_of(dot);
        }
    }
}

// `out[e]` is the sum over e's rows of `row(r)` times `weight(r)`, for this thread's share of the columns.
template <class T, class Row, class Weight>
void sum_rows(
    const struct kpt_experts& p, const kpt_rows& out, int64_t columns, const Member& member, Row row, Weight weight) {
    int64_t begin, end;
    member.share(columns, W, begin, end);
    for (int64_t expert = 0; expert < p.experts; expert++) {
        for (int64_t j = begin; j < end; j += W) {
            // One running sum of many rows would round away what is added last.
            constexpr int64_t run = 256;
            double sums[W] = {};
            for (int64_t r = first_row(p.offsets, expert), stop; r < p.offsets[expert]; r = stop) {
                stop = r + run < p.offsets[expert] ? r + run : p.offsets[expert];
                vf part = {};
                for (int64_t i = r; i < stop; i++) part += load(row(i) + j, end - j) * weight(i);
                for (int i = 0; i < W; i++) sums[i] += static_cast<double>(part[i]);
            }
            vf sum = {};
            for (int i = 0; i < W; i++) sum[i] = static_cast<float>(sums[i]);
            store(row_of<T>(out, expert, j), sum, end - j);
        }
    }
}

template <class T>
int backward(const struct kpt_experts_backward& given) {
    const struct kpt_experts& p = given.forward;
    const int64_t pairs = pairs_of(p), taken = rows_here(p);
    const int threads = threads_for(multiplications_of(p), p.threads);
    const ColumnBlocks inner = ColumnBlocks::of(p.intermediate, columns_at_once(p.hidden));
    const ColumnBlocks outer = ColumnBlocks::of(p.hidden, columns_at_once(p.width));
    const int64_t highest = most_rows(p.offsets, p.experts);
    const int64_t size = Block::bytes(most_of(p.hidden, p.width, highest));
    const bool of_bias = p.down_bias.data != nullptr;
    const bool need_h = given.grad_x.data != nullptr || given.grad_up.data != nullptr || given.grad_up_bias.data != nullptr;
    const bool need_dots = given.grad_weights.data != nullptr, need_weighted = given.grad_down.data != nullptr;
    Layout layout;
    const int64_t blocks_at = layout.add(most_row_blocks(pairs, p.experts) * sizeof(RowBlock));
    const int64_t tokens_at = layout.add(pairs * sizeof(int32_t));
    const int64_t grad_h_at = layout.add(need_h ? taken * p.width * sizeof(T) : 0);
    const int64_t weighted_at = layout.add(need_weighted ? taken * p.intermediate * sizeof(T) : 0);
    const int64_t dots_at = layout.add(need_dots ? (inner.count + 1) * taken * sizeof(float) : 0);
    const int64_t rows_at = layout.add(given.grad_x.data != nullptr ? pairs * p.hidden * sizeof(T) : 0);
    const int64_t spaces_at = layout.add(size * threads);
    const Scratch scratch(layout.size());
    if (scratch.get() == nullptr) return KPT_NO_MEMORY;
    char* memory = static_cast<char*>(scratch.get());
    RowBlock* blocks = reinterpret_cast<RowBlock*>(memory + blocks_at);
    int32_t* tokens = reinterpret_cast<int32_t*>(memory + tokens_at);
    for (int64_t row = 0; row < taken; row++) tokens[row] = static_cast<int32_t>(p.order[row] / p.top_k);
    const int64_t fewest = inner.count < outer.count ? inner.count : outer.count;
    const int64_t block_count = cut_rows(p.offsets, p.experts, fewest, threads, blocks);
    const Backward<T> b{
        given, p, taken, blocks, block_count, tokens,
        need_h ? reinterpret_cast<T*>(memory + grad_h_at) : nullptr,
        need_weighted ? reinterpret_cast<T*>(memory + weighted_at) : nullptr,
        need_dots ? reinterpret_cast<float*>(memory + dots_at) : nullptr,
        reinterpret_cast<T*>(memory + rows_at)};

    const Factor of_grad = factor_of_rows(given.grad, tokens);
    const Factor of_grad_h{b.grad_h, p.width, nullptr, p.x.dtype, true, {}};
    const kpt_rows grad_h_rows{b.grad_h, p.width, p.x.dtype}, weighted_rows{b.weighted, p.intermediate, p.x.dtype};
    const WeightGradient down{weighted_rows, nullptr,        given.grad, tokens,    given.grad_down,
                              p.intermediate, p.hidden, p.offsets,  p.experts};
    const WeightGradient up{p.x, tokens, grad_h_rows, nullptr, given.grad_up, p.hidden, p.width, p.offsets, p.experts};
    Counter slope_tasks, down_tasks, up_tasks, x_tasks;
    parallel(threads, [&](const Member& member) {
        const Block block = Block::at(memory + spaces_at, size, member.rank);
        const bool need_slope = need_h || need_dots || need_weighted;
        const int64_t tasks = need_slope ? block_count * inner.count : 0;
        for (int64_t task = slope_tasks.next(); task < tasks; task = slope_tasks.next()) {
            const RowBlock& rows = blocks[task / inner.count];
            const Columns columns{inner.first(task % inner.count), inner.size(task % inner.count)};
            const auto finish = [&](int64_t row, int64_t many, const float* sums) {
                differentiate_sums(b, rows.expert, row, many, columns, task % inner.count, sums);
            };
            multiply_matrix(
                block, of_grad, rows.first, rows.rows, p.down, rows.expert, false, columns, p.hidden, finish);
        }
        if (need_dots && of_bias) dot_with_bias(b, inner.count, member);
        member.wait();
        if (need_dots) store_weight_gradients(b, inner.count + (of_bias ? 1 : 0), member);
        if (need_weighted) weight_gradient(down, block, down_tasks);
        if (given.grad_up.data != nullptr) weight_gradient(up, block, up_tasks);
        if (given.grad_down_bias.data != nullptr) {
            sum_rows<T>(
                p, given.grad_down_bias, p.hidden, member, [&](int64_t r) { return row_of<T>(given.grad, tokens[r]); },
                [&](int64_t r) { return weight_of(p.weights, p.order[r]); });
        }
        if (given.grad_up_bias.data != nullptr) {
            sum_rows<T>(
                p, given.grad_up_bias, p.width, member, [&](int64_t r) { return b.grad_h + r * p.width; },
                [](int64_t) { return 1.0f; });
        }
        if (given.grad_x.data == nullptr) return;
        for (int64_t task = x_tasks.next(); task < block_count * outer.count; task = x_tasks.next()) {
            const RowBlock& rows = blocks[task / outer.count];
            const Columns columns{outer.first(task % outer.count), outer.size(task % outer.count)};
            const auto finish = [&](int64_t row, int64_t many, const float* sums) {
                for (int64_t r = 0; r < many; r++) {
                    T* out = b.grad_rows + p.order[row + r] * p.hidden + columns.first;
                    store_run(out, sums + r * columns.width(), columns.count);
                }
            };
            multiply_matrix(
                block, of_grad_h, rows.first, rows.rows, p.up, rows.expert, false, columns, p.width, finish);
        }
        member.wait();
        sum_pairs(p, b.grad_rows, given.grad_x, member);
    });
    return KPT_OK;
}

}  // namespace

extern "C" int kpt_experts_backward(const struct kpt_experts_backward* given) {
    int code = KPT_OK;
    with_float_type(given->forward.x.dtype, [&](auto type) { code = backward<decltype(type)>(*given); });
    return code;
}
