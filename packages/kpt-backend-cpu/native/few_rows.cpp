#include "few_rows.h"

#include "dot.h"

namespace kpt {

namespace {

// Where rows are more, decoding weights for a product of many rows costs less than it saves.
constexpr int64_t few = 16;

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

void stage_rows(const Rows& r, const Member& member) {
    int64_t begin, end;
    member.share(r.assigned, 1, begin, end);
    for (int64_t i = 0; i < r.num_active; i++) {
        const Active& own = r.active[i];
        for (int64_t row = own.first; row < own.first + own.rows; row++) {
            if (row >= begin && row < end) stage_row(r, row, own.expert);
        }
    }
}

void write_zeros(const Rows& r, const Member& member) {
    const kpt_rows& out = r.args.out;
    int64_t begin, end;
    member.share(r.args.rows - r.assigned, 1, begin, end);
    for (int64_t row = r.assigned + begin; row < r.assigned + end; row++) {
        const int64_t size = size_of(out.dtype);
        memset(static_cast<char*>(out.data) + row * out.stride * size, 0, r.args.columns * size);
    }
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
            args.weight, own.expert, n, n + count, args.columns, r.staging, r.pointers + own.first, own.rows,
            scaled_ranges ? x_scale : nullptr, args.x_scale_columns, results, step});
        for (int64_t m = 0; m < own.rows; m++) {
            float* result = results + m * step;
            if (scaled_rows) {
                for (int64_t i = 0; i < count; i++) result[i] *= x_scale[m];
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
    return end <= few * experts;
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
    const Scratch staged(r.assigned * staging.bytes());
    const Scratch pointers(r.assigned * static_cast<int64_t>(sizeof(void*)));
    const Scratch results(r.results_size * args.threads * static_cast<int64_t>(sizeof(float)));
    r.staged = static_cast<char*>(staged.get());
    r.pointers = static_cast<const void**>(pointers.get());
    r.results = static_cast<float*>(results.get());
    if (r.staged == nullptr || r.pointers == nullptr || r.results == nullptr) return KPT_NO_MEMORY;
    for (int64_t row = 0; row < r.assigned; row++) r.pointers[row] = r.staged + row * staging.bytes();
    const int64_t bytes = r.num_active * args.inner * args.columns * size_of(args.weight.dtype);
    parallel(threads_to_read(bytes, args.threads), [&](const Member& member) {
        stage_rows(r, member);
        write_zeros(r, member);
        member.wait();
        float* own_results = r.results + member.rank * r.results_size;
        for_share(member, r.active, r.num_active, args.columns, 64, [&](const Active& own, int64_t begin, int64_t end) {
            multiply_part(r, own, begin, end, own_results);
        });
    });
    return KPT_OK;
}

}  // namespace kpt
