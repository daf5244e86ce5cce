// The gradients of moe.experts, from the input and the pre-activation alone. The gradient of a routing weight is the inner
// product of the activation with the gradient behind the down projection (SonicMoE, arXiv:2512.14080).
#include "experts.h"
#include "wgrad.h"

using namespace kpt;

namespace {

KPT_INLINE int64_t most_of(int64_t a, int64_t b, int64_t c) { return a > b ? (a > c ? a : c) : b > c ? b : c; }

// Everything that the tasks of one call share; of the group's and `dots`, what is not wanted is null.
template <class T>
struct Backward {
    const struct kpt_experts_backward& given;
    const struct kpt_experts& p;
    int64_t taken;
    const int32_t* tokens; // of sorted rows
    // Of the rows of a group, from its first one (`base`) on:
    T* grad_h;   // [rows, width]
    T* weighted; // [rows, intermediate], the activation times the routing weight
    // Of all:
    float* dots;  // [blocks of columns, rows]
    T* grad_rows; // [pairs, hidden]
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
    const Backward<T>& b, int64_t base, int64_t expert, int64_t first_row, int64_t rows, const Columns& columns,
    int64_t column_block, const float* sums) {
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
            const float weight = weight_of(p, p.order[row]);
            const float* own = sums + r * columns.pitch();
            split_gates(row_of<T>(p.h, row, of_h), gated, interleaved, p.intermediate, count, gates, ups);
            vf dot = {};
            for (int64_t j = 0; j < count; j += W) {
                const vf gate = load(gates + j) + load(gate_bias + j), up = load(ups + j) + load(up_bias + j);
                const vf grad = load(own + j), value = act.value(gate, up);
                // Past the last column is what another row left there, which may be anything.
                const int64_t own_columns = count - j;
                dot += own_columns >= W ? grad * value : first_of(grad * value, own_columns);
                if (b.weighted != nullptr) {
                    store(b.weighted + (row - base) * p.intermediate + first + j, value * weight, count - j);
                }
                vf grad_gate, grad_up;
                act.slope(grad * weight, gate, up, grad_gate, grad_up);
                store(gates + j, grad_gate);
                store(ups + j, grad_up);
            }
            if (b.dots != nullptr) b.dots[column_block * b.taken + row] = sum_of(dot);
            if (b.grad_h != nullptr) {
                T* to = b.grad_h + (row - base) * p.width + of_h;
                join_gates(to, gated, interleaved, p.intermediate, count, gates, ups);
            }
        }
    });
}

// Gradients of the routing weights of the sorted rows begin..end, from their parts.
template <class T>
void store_weight_gradients(const Backward<T>& b, int64_t parts, int64_t begin, int64_t end) {
    with_float_type(b.given.grad_weights.dtype, [&](auto type) {
        using U = decltype(type);
        U* out = static_cast<U*>(b.given.grad_weights.data);
        for (int64_t row = begin; row < end; row++) {
            float sum = 0;
            if (row < b.taken) {
                for (int64_t part = 0; part < parts; part++) sum += b.dots[part * b.taken + row];
            }
            narrow(sum, out + b.p.order[row]);
        }
    });
}

// <grad, bias of the down projection> of each row of a block, as one more part of the inner products.
template <class T>
void dot_with_bias(const Backward<T>& b, int64_t part, const RowBlock& rows) {
    const struct kpt_experts& p = b.p;
    const T* bias = row_of<T>(p.down_bias, rows.expert);
    for (int64_t row = rows.first; row < rows.first + rows.rows; row++) {
        const T* grad = row_of<T>(b.given.grad, b.tokens[row]);
        vf dot = {};
        for (int64_t j = 0; j < p.hidden; j += W) dot += load(grad + j, p.hidden - j) * load(bias + j, p.hidden - j);
        b.dots[part * b.taken + row] = sum_of(dot);
    }
}

// Columns begin..end of `out[expert]`, the sum over the expert's rows of `row(r)` times `weight(r)`.
template <class T, class Row, class Weight>
void sum_rows(
    const struct kpt_experts& p, const kpt_rows& out, int64_t expert, int64_t begin, int64_t end, Row row, Weight weight) {
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

// Columns of a bias gradient that are summed in one task.
constexpr int64_t bias_columns = 256;

template <class T>
void sum_bias_gradient(const Backward<T>& b, bool up, int64_t base, int64_t expert, int64_t begin) {
    const struct kpt_experts& p = b.p;
    const int64_t columns = up ? p.width : p.hidden, end = columns - begin < bias_columns ? columns : begin + bias_columns;
    if (up) {
        sum_rows<T>(
            p, b.given.grad_up_bias, expert, begin, end, [&](int64_t r) { return b.grad_h + (r - base) * p.width; },
            [](int64_t) { return 1.0f; });
    } else {
        sum_rows<T>(
            p, b.given.grad_down_bias, expert, begin, end,
            [&](int64_t r) { return row_of<T>(b.given.grad, b.tokens[r]); },
            [&](int64_t r) { return weight_of(p, p.order[r]); });
    }
}

template <class T>
int backward(const struct kpt_experts_backward& given) {
    const struct kpt_experts& p = given.forward;
    const int64_t pairs = pairs_of(p), taken = rows_here(p);
    const int threads = threads_for(multiplications_of(p), p.threads);
    const ColumnBlocks inner = ColumnBlocks::of(p.intermediate, columns_at_once(p.hidden));
    const ColumnBlocks outer = ColumnBlocks::of(p.hidden, columns_at_once(p.width));
    const int64_t size = Block::bytes(most_of(p.hidden, p.width, most_rows(p.offsets, p.experts)));
    const bool of_bias = p.down_bias.data != nullptr, need_x = given.grad_x.data != nullptr;
    const int64_t up_bias_parts = given.grad_up_bias.data != nullptr ? (p.width + bias_columns - 1) / bias_columns : 0;
    const int64_t down_bias_parts = given.grad_down_bias.data != nullptr ? (p.hidden + bias_columns - 1) / bias_columns : 0;
    const int64_t bias_parts = up_bias_parts + down_bias_parts;
    const bool need_h = need_x || given.grad_up.data != nullptr || given.grad_up_bias.data != nullptr;
    const bool need_dots = given.grad_weights.data != nullptr, need_weighted = given.grad_down.data != nullptr;

    const Scratch listed(most_row_blocks(pairs, p.experts) * static_cast<int64_t>(sizeof(RowBlock)));
    if (listed.get() == nullptr) return KPT_NO_MEMORY;
    RowBlock* blocks = static_cast<RowBlock*>(listed.get());
    const int64_t fewest = inner.count < outer.count ? inner.count : outer.count;
    const int64_t block_count = cut_rows(p.offsets, p.experts, fewest, threads, blocks);
    const int64_t kept = (need_h ? p.width : 0) + (need_weighted ? p.intermediate : 0);
    const Groups groups{blocks, block_count, kept * static_cast<int64_t>(sizeof(T)), inner.count, threads, true};
    const int64_t rows_at_once = groups.most_rows();
    Layout layout;
    const auto tokens_at = layout.add<int32_t>(taken);
    const auto grad_h_at = layout.add<T>(need_h ? rows_at_once * p.width : 0);
    const auto weighted_at = layout.add<T>(need_weighted ? rows_at_once * p.intermediate : 0);
    const auto dots_at = layout.add<float>(need_dots ? (inner.count + 1) * taken : 0);
    const auto rows_at = layout.add<T>(need_x ? pairs * p.hidden : 0);
    const auto spaces_at = layout.add<char>(size * threads);
    const Scratch scratch(layout.size());
    if (scratch.get() == nullptr) return KPT_NO_MEMORY;
    int32_t* tokens = tokens_at.in(scratch);
    for (int64_t row = 0; row < taken; row++) tokens[row] = static_cast<int32_t>(p.order[row] / p.top_k);
    const Backward<T> b{
        given, p, taken, tokens, need_h ? grad_h_at.in(scratch) : nullptr,
        need_weighted ? weighted_at.in(scratch) : nullptr, need_dots ? dots_at.in(scratch) : nullptr, rows_at.in(scratch)};

    const Factor of_grad = factor_of_rows(given.grad, tokens);
    const Factor of_grad_h{b.grad_h, p.width, nullptr, p.x.dtype, true, {}};
    const kpt_rows grad_h{b.grad_h, p.width, p.x.dtype}, weighted{b.weighted, p.intermediate, p.x.dtype};
    const WeightGradient down(
        weighted, nullptr, given.grad, tokens, given.grad_down, p.intermediate, p.hidden, p.offsets, p.experts);
    const WeightGradient up(p.x, tokens, grad_h, nullptr, given.grad_up, p.hidden, p.width, p.offsets, p.experts);
    Tasks differentiating, multiplying, storing, summing;
    parallel(threads, [&](int rank) {
        const Block block = Block::at(spaces_at.in(scratch), size, rank);
        int64_t own_first = -1, own_second = -1, first_tasks = 0, second_tasks = 0, begin = 0;
        do {
            const int64_t end = groups.end(begin), base = begin < end ? blocks[begin].first : 0;
            const int64_t expert = begin > 0 ? blocks[begin - 1].expert + 1 : 0;
            const int64_t experts = (end < block_count ? blocks[end - 1].expert + 1 : p.experts) - expert;

            const int64_t slopes = need_h || need_dots || need_weighted ? (end - begin) * inner.count : 0;
            const int64_t first_before = first_tasks;
            first_tasks += slopes + (need_dots && of_bias ? end - begin : 0);
            differentiating.up_to(first_tasks, own_first, [&](int64_t task) {
                task -= first_before;
                if (task >= slopes) return dot_with_bias(b, inner.count, blocks[begin + task - slopes]);
                const RowBlock& rows = blocks[begin + task / inner.count];
                const Columns columns{inner.first(task % inner.count), inner.size(task % inner.count)};
                const auto finish = [&](int64_t row, int64_t many, const float* sums) {
                    differentiate_sums(b, base, rows.expert, row, many, columns, task % inner.count, sums);
                };
                multiply_matrix(
                    block, of_grad, rows.first, rows.rows, p.down, rows.expert, false, columns, p.hidden, finish);
            });

            const int64_t downs = down.tasks(experts), ups = up.tasks(experts);
            const int64_t products = need_x ? (end - begin) * outer.count : 0, second_before = second_tasks;
            second_tasks += downs + ups + products + experts * bias_parts;
            multiplying.up_to(second_tasks, own_second, [&](int64_t task) {
                task -= second_before;
                if (task < downs) return down.run(task, block, expert, base);
                task -= downs;
                if (task < ups) return up.run(task, block, expert, base);
                task -= ups;
                if (task >= products) {
                    const int64_t part = (task - products) % bias_parts;
                    const bool of_up = part < up_bias_parts;
                    return sum_bias_gradient(
                        b, of_up, base, expert + (task - products) / bias_parts,
                        (of_up ? part : part - up_bias_parts) * bias_columns);
                }
                const RowBlock& rows = blocks[begin + task / outer.count];
                const Columns columns{outer.first(task % outer.count), outer.size(task % outer.count)};
                const auto finish = [&](int64_t row, int64_t many, const float* sums) {
                    for (int64_t r = 0; r < many; r++) {
                        T* out = b.grad_rows + p.order[base + row + r] * p.hidden + columns.first;
                        store_run(out, sums + r * columns.pitch(), columns.count);
                    }
                };
                multiply_matrix(
                    block, of_grad_h, rows.first - base, rows.rows, p.up, rows.expert, false, columns, p.width, finish);
            });
            begin = end;
        } while (begin < block_count);
        if (need_dots) {
            storing.in_steps(pairs, 1024, [&](int64_t from, int64_t to) {
                store_weight_gradients(b, inner.count + (of_bias ? 1 : 0), from, to);
            });
        }
        if (need_x) {
            summing.in_steps(p.tokens, tokens_of_task, [&](int64_t from, int64_t to) {
                sum_pairs(p, b.grad_rows, given.grad_x, from, to);
            });
        }
    });
    return KPT_OK;
}

}  // namespace

extern "C" int kpt_experts_backward(const struct kpt_experts_backward* given) {
    int code = KPT_OK;
    with_float_type(given->forward.x.dtype, [&](auto type) { code = backward<decltype(type)>(*given); });
    return code;
}
