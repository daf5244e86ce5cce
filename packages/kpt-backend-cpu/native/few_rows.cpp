#include "few_rows.h"

#include "dot.h"
#include "scratch.h"
#include "tasks.h"

namespace kpt {

namespace {

// Where rows of an expert are more, decoding weights for a product of many rows costs less than it saves, and tiles multiply
// faster than memory delivers.
int64_t few_rows(const struct kpt_grouped_mm& args) {
    const kpt_matrices& w = args.weight;
    const bool turned = args.x.dtype == KPT_BFLOAT16 && w.stride_k == 1 && w.scales_of != KPT_SCALES_K;
    return KPT_HAS_TILES && turned ? 4 : 16;
}

struct Rows {
    const struct kpt_grouped_mm& args;
    Staging staging;
    int64_t assigned;  // rows before the last offset
    Active* active;
    int64_t num_active, most_rows;
    char* staged;
    const void** pointers;
    float* results;  // of each thread
    int64_t results_size;
};

// Scales of x that are not left for the result: those of blocks where the product is not of bfloat16.
bool scales_when_staged(const Rows& r) {
    return r.args.x_scale != nullptr && r.args.x_scale_columns > 1 && !r.staging.bf16;
}

void stage_row(const Rows& r, int64_t row, int64_t expert) {
    const struct kpt_grouped_mm& args = r.args;
    const kpt_matrices& w = args.weight;
    const char* x = static_cast<const char*>(args.x.data) + row * args.x.stride * size_of(args.x.dtype);
    float values[scale_block];
    for (int64_t k = 0; k < args.inner; k += scale_block) {
        const int64_t count = args.inner - k < scale_block ? args.inner - k : scale_block;
        widen_all(x + k * size_of(args.x.dtype), args.x.dtype, count, values);
        if (scales_when_staged(r)) {
            const float scale = args.x_scale[row * args.x_scale_columns + k / scale_block];
            for (int64_t i = 0; i < count; i++) values[i] *= scale;
        }
        if (w.scales_of == KPT_SCALES_K) {
            const float* scale = w.scale + expert * w.stride_se + k * w.stride_sk;
            for (int64_t i = 0; i < count; i++) values[i] *= scale[i * w.stride_sk];
        }
        stage(r.staging, values, k, count, r.staged + row * r.staging.bytes());
    }
}

// Stage the rows begin..end, and write zeros where these are no expert's.
void prepare_rows(const Rows& r, int64_t begin, int64_t end) {
    for (int64_t i = 0; i < r.num_active; i++) {
        const Active& own = r.active[i];
        const int64_t first = own.first > begin ? own.first : begin, last = own.first + own.rows;
        for (int64_t row = first; row < last && row < end; row++) stage_row(r, row, own.expert);
    }
    if (end > r.assigned) zero_rows(r.args.out, begin > r.assigned ? begin : r.assigned, end, r.args.columns);
}

// Add `count` numbers of any float dtype.
void add_all(const void* from, int32_t dtype, int64_t count, float* to) {
    with_float_type(dtype, [&](auto type) {
        const auto* own = static_cast<const decltype(type)*>(from);
        for (int64_t i = 0; i < count; i += W) store(to + i, load(to + i, count - i) + load(own + i, count - i), count - i);
    });
}

void multiply_part(const Rows& r, const Active& own, int64_t begin, int64_t end, float* results) {
    const struct kpt_grouped_mm& args = r.args;
    const bool scaled_ranges = args.x_scale != nullptr && args.x_scale_columns > 1 && r.staging.bf16;
    const bool scaled_rows = args.x_scale != nullptr && args.x_scale_columns == 1;
    const float* x_scale = args.x_scale + own.first * args.x_scale_columns;
    const int64_t step = columns_for_rows(own.rows);
    for (int64_t n = begin; n < end; n += step) {
        const int64_t count = end - n < step ? end - n : step;
        multiply(Product{
            args.weight, own.expert, n, n + count, r.staging, r.pointers + own.first, own.rows,
            scaled_ranges ? x_scale : nullptr, args.x_scale_columns, results, step});
        for (int64_t m = 0; m < own.rows; m++) {
            float* result = results + m * step;
            if (scaled_rows) {
                for (int64_t i = 0; i < count; i++) result[i] *= x_scale[m];
            }
            if (args.row_scale != nullptr) {
                for (int64_t i = 0; i < count; i++) result[i] *= args.row_scale[own.first + m];
            }
            if (args.bias.data != nullptr) {
                const int64_t at = (own.expert * args.bias.stride + n) * size_of(args.bias.dtype);
                add_all(static_cast<const char*>(args.bias.data) + at, args.bias.dtype, count, result);
            }
            char* out = static_cast<char*>(args.out.data);
            const int64_t at = (own.first + m) * args.out.stride + n;
            narrow_all(result, count, args.out.dtype, out + at * size_of(args.out.dtype));
        }
    }
}

}  // namespace

bool serves_few_rows(const struct kpt_grouped_mm& args) {
    int64_t experts = 0, end = 0;
    for (int64_t e = 0; e < args.experts; e++) {
        const int64_t next = int64_t{args.offsets[e]};
        if (next > end) {
            experts++;
            end = next;
        }
    }
    return end <= few_rows(args) * experts;
}

int grouped_mm_few_rows(const struct kpt_grouped_mm& args) {
    const Staging staging = staging_for(args.x.dtype, args.weight, args.inner);
    Rows r{args, staging, 0, nullptr, 0, 0, nullptr, nullptr, nullptr, 0};
    const Scratch active(args.experts * static_cast<int64_t>(sizeof(Active)));
    r.active = static_cast<Active*>(active.get());
    if (r.active == nullptr) return KPT_NO_MEMORY;
    for (int64_t e = 0; e < args.experts; e++) {
        const int64_t end = int64_t{args.offsets[e]}, rows = end - r.assigned;
        if (rows <= 0) continue;
        r.active[r.num_active++] = Active{e, r.assigned, rows};
        r.assigned = end;
        if (rows > r.most_rows) r.most_rows = rows;
    }
    r.results_size = results_at_once(r.most_rows);
    Layout layout;
    const auto staged = layout.add<char>(r.assigned * staging.bytes());
    const auto pointers = layout.add<const void*>(r.assigned);
    const auto results = layout.add<float>(r.results_size * args.threads);
    const Scratch scratch(layout.size());
    if (scratch.get() == nullptr) return KPT_NO_MEMORY;
    r.staged = staged.in(scratch);
    r.pointers = pointers.in(scratch);
    r.results = results.in(scratch);
    for (int64_t row = 0; row < r.assigned; row++) r.pointers[row] = r.staged + row * staging.bytes();
    const int64_t column_bytes = args.inner * size_of(args.weight.dtype);
    const Parts parts(r.active, r.num_active, args.columns, column_bytes, args.threads);
    Tasks preparing, multiplying;
    parallel(threads_to_read(r.num_active * args.columns * column_bytes, args.threads), [&](int rank) {
        preparing.in_steps(args.rows, 4, [&](int64_t begin, int64_t end) { prepare_rows(r, begin, end); });
        float* own_results = r.results + rank * r.results_size;
        parts.run(multiplying, [&](const Active& own, int64_t begin, int64_t end) {
            multiply_part(r, own, begin, end, own_results);
        });
    });
    return KPT_OK;
}

}  // namespace kpt
