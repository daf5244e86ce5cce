// moe.grouped_mm, moe.scaled_grouped_mm and moe.grouped_mm_wgrad.
#include "dot.h"
#include "few_rows.h"
#include "scratch.h"
#include "tasks.h"
#include "wgrad.h"

using namespace kpt;

extern "C" int kpt_grouped_mm(const struct kpt_grouped_mm* given) {
    const struct kpt_grouped_mm& p = *given;
    if (serves_few_rows(p)) return grouped_mm_few_rows(p);
    const int threads = threads_for(p.rows * p.inner * p.columns, p.threads);
    const int64_t size = Block::bytes(p.inner);
    const Scratch space(size * threads);
    const Scratch listed(most_row_blocks(p.rows, p.experts) * sizeof(RowBlock));
    if (space.get() == nullptr || listed.get() == nullptr) return KPT_NO_MEMORY;
    RowBlock* blocks = static_cast<RowBlock*>(listed.get());
    const ColumnBlocks columns = ColumnBlocks::of(p.columns, columns_at_once(p.inner));
    const int64_t tasks = cut_rows(p.offsets, p.experts, columns.count, threads, blocks) * columns.count;
    Factor left = factor_of_rows(p.x, nullptr);
    if (p.x_scale != nullptr) left.scale = {p.x_scale, p.x_scale_columns, p.x_scale_columns > 1 ? 1 : 0, 0, 7};
    Tasks products;
    parallel(threads, [&](int rank) {
        const Block block = Block::at(space.get(), size, rank);
        products.all(tasks, [&](int64_t task) {
            const RowBlock& rows = blocks[task / columns.count];
            const Columns own{columns.first(task % columns.count), columns.size(task % columns.count)};
            const bool plain = p.row_scale == nullptr && p.bias.data == nullptr;
            float bias[kColumns] = {};
            if (p.bias.data != nullptr) {
                const int64_t at = (rows.expert * p.bias.stride + own.first) * size_of(p.bias.dtype);
                widen_all(static_cast<const char*>(p.bias.data) + at, p.bias.dtype, own.count, bias);
            }
            const auto finish = [&](int64_t first, int64_t count, const float* sums) {
                with_float_type(p.out.dtype, [&](auto type) {
                    using T = decltype(type);
                    for (int64_t r = 0; r < count; r++) {
                        T* to = row_of<T>(p.out, first + r, own.first);
                        const float* from = sums + r * own.pitch();
                        if (plain) store_run(to, from, own.count);
                        else store_run(to, from, own.count, p.row_scale != nullptr ? p.row_scale[first + r] : 1.0f, bias);
                    }
                });
            };
            multiply_matrix(block, left, rows.first, rows.rows, p.weight, rows.expert, true, own, p.inner, finish);
        });
    });
    zero_rows(p.out, p.experts > 0 ? p.offsets[p.experts - 1] : 0, p.rows, p.columns);
    return KPT_OK;
}

extern "C" int kpt_grouped_mm_wgrad(const struct kpt_grouped_mm_wgrad* given) {
    const struct kpt_grouped_mm_wgrad& p = *given;
    const int threads = threads_for(p.rows * p.inner * p.columns, p.threads);
    const int64_t size = Block::bytes(most_rows(p.offsets, p.experts));
    const Scratch space(size * threads);
    if (space.get() == nullptr) return KPT_NO_MEMORY;
    const kpt_matrices out{p.out, p.inner * p.columns, p.columns, 1, p.x.dtype, KPT_SCALES_NONE, nullptr, 0, 0, 0};
    const WeightGradient work(p.x, nullptr, p.grad, nullptr, out, p.inner, p.columns, p.offsets, p.experts);
    Tasks products;
    parallel(threads, [&](int rank) {
        const Block block = Block::at(space.get(), size, rank);
        products.all(work.tasks(p.experts), [&](int64_t task) { work.run(task, block); });
    });
    return KPT_OK;
}
