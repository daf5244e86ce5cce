#include <algorithm>
#include <cmath>
#include <limits>

#include "tensors.h"

namespace test {

namespace {

struct Case {
    int dtype;
    int64_t batch, kv_heads, groups, queries, keys, dim, value_dim, gap, intervals;
    bool causal, blocks, sinks, lse;
    int64_t position;
    double softcap;
    int threads;

    int64_t heads() const { return kv_heads * groups; }
    int64_t rows() const { return batch * heads() * queries; }
};

// [batch, heads, tokens, dim] as rows with gaps.
kpt_heads view(const Rows& x, int64_t heads, int64_t tokens) {
    return {x.memory.data(), heads * tokens * x.stride, tokens * x.stride, x.stride, x.dtype};
}

// What a mask is made of, and what it says.
struct Mask {
    std::vector<int32_t> intervals, blocks;
    std::vector<uint8_t> bits;
    std::vector<bool> seen;  // [batch, heads, queries, keys]
};

Mask draw_mask(Random& random, const Case& c) {
    Mask mask;
    mask.seen.assign(c.rows() * c.keys, true);
    const int64_t q_blocks = (c.queries + 127) / 128, k_blocks = (c.keys + 127) / 128;
    for (int64_t i = 0; c.blocks && i < q_blocks * k_blocks; i++) mask.blocks.push_back(static_cast<int32_t>(random.below(4)));
    if (c.blocks) {
        for (int64_t i = 0; i < 2 * 128 * 16; i++) mask.bits.push_back(static_cast<uint8_t>(random.below(256)));
    }
    // Rows have them in common; now and then nothing is left.
    for (int64_t i = 0; i < c.queries * c.intervals; i++) {
        const int64_t begin = random.below(c.keys + 1), end = random.below(4) == 0 ? begin : begin + random.below(c.keys - begin + 1);
        mask.intervals.push_back(static_cast<int32_t>(begin));
        mask.intervals.push_back(static_cast<int32_t>(end));
    }
    for (int64_t row = 0; row < c.rows(); row++) {
        const int64_t q = row % c.queries;
        for (int64_t k = 0; k < c.keys; k++) {
            bool seen = !c.causal || k <= q + c.position, inside = c.intervals == 0;
            for (int64_t i = 0; i < c.intervals; i++) {
                const int32_t* own = mask.intervals.data() + 2 * (q * c.intervals + i);
                inside = inside || (k >= own[0] && k < own[1]);
            }
            if (c.blocks) {
                const int32_t block = mask.blocks[q / 128 * k_blocks + k / 128];
                const uint8_t byte = block >= 2 ? mask.bits[((block - 2) * 128 + q % 128) * 16 + k % 128 / 8] : 0;
                seen = seen && (block == 1 || (block >= 2 && (byte >> (k % 8) & 1)));
            }
            mask.seen[row * c.keys + k] = seen && inside;
        }
    }
    return mask;
}

// Everything in float64.
struct Truth {
    std::vector<double> out, lse, grad_q, grad_k, grad_v;
};

Truth truth_of(
    const Case& c, const Mask& mask, const Rows& q, const Rows& k, const Rows& v, const Rows& grad,
    const std::vector<float>& grad_lse, const std::vector<float>& sinks, double scale) {
    Truth t;
    const int64_t kv_rows = c.batch * c.kv_heads * c.keys;
    t.out.assign(c.rows() * c.value_dim, 0.0);
    t.lse.assign(c.rows(), -INFINITY);
    t.grad_q.assign(c.rows() * c.dim, 0.0);
    t.grad_k.assign(kv_rows * c.dim, 0.0);
    t.grad_v.assign(kv_rows * c.value_dim, 0.0);
    std::vector<double> scores(c.keys), slopes(c.keys), changes(c.keys);
    for (int64_t row = 0; row < c.rows(); row++) {
        const int64_t head = row / c.queries % c.heads(), batch = row / c.queries / c.heads();
        const int64_t first = (batch * c.kv_heads + head / c.groups) * c.keys;
        const auto seen = [&](int64_t key) { return mask.seen[row * c.keys + key]; };
        double most = c.sinks ? static_cast<double>(sinks[head]) : -INFINITY;
        for (int64_t key = 0; key < c.keys; key++) {
            if (!seen(key)) continue;
            double sum = 0.0;
            for (int64_t d = 0; d < c.dim; d++) sum += q.values[row * c.dim + d] * k.values[(first + key) * c.dim + d];
            scores[key] = sum * scale;
            slopes[key] = 1.0;
            if (c.softcap > 0.0) {
                const double capped = std::tanh(scores[key] / c.softcap);
                scores[key] = capped * c.softcap;
                slopes[key] = 1.0 - capped * capped;
            }
            most = std::max(most, scores[key]);
        }
        if (most == -INFINITY) continue;
        double total = c.sinks ? std::exp(static_cast<double>(sinks[head]) - most) : 0.0;
        for (int64_t key = 0; key < c.keys; key++) total += seen(key) ? std::exp(scores[key] - most) : 0.0;
        t.lse[row] = most + std::log(total);
        double common = -static_cast<double>(grad_lse[row]);
        for (int64_t key = 0; key < c.keys; key++) {
            if (!seen(key)) continue;
            scores[key] = std::exp(scores[key] - most) / total;
            changes[key] = 0.0;
            for (int64_t d = 0; d < c.value_dim; d++) {
                const double value = v.values[(first + key) * c.value_dim + d], given = grad.values[row * c.value_dim + d];
                t.out[row * c.value_dim + d] += scores[key] * value;
                t.grad_v[(first + key) * c.value_dim + d] += scores[key] * given;
                changes[key] += given * value;
            }
            common += scores[key] * changes[key];
        }
        for (int64_t key = 0; key < c.keys; key++) {
            if (!seen(key)) continue;
            const double change = scores[key] * (changes[key] - common) * slopes[key] * scale;
            for (int64_t d = 0; d < c.dim; d++) {
                t.grad_q[row * c.dim + d] += change * k.values[(first + key) * c.dim + d];
                t.grad_k[(first + key) * c.dim + d] += change * q.values[row * c.dim + d];
            }
        }
    }
    return t;
}

// Of a few roundings in the dtype, of numbers as large as the largest.
void check(const char* what, int dtype, const std::vector<double>& got, const std::vector<double>& want) {
    double largest = 0.0;
    for (double each : want) largest = std::max(largest, std::isfinite(each) ? std::fabs(each) : 0.0);
    const double part = dtype == KPT_FLOAT32 ? 2e-5 : dtype == KPT_BFLOAT16 ? 3e-2 : 4e-3;
    compare(what, got, want, std::vector<double>(want.size(), part * (1.0 + largest)));
}

void check_attention(Random& random, const Case& c) {
    begin_case(
        "kpt_attention_forward and backward of %s, batch %lld, heads %lld of %lld, %lld queries at %lld, %lld keys, dims "
        "%lld and %lld, gap %lld, %lld intervals, causal %d, blocks %d, sinks %d, lse %d, softcap %g, %d threads",
        name_of(c.dtype), static_cast<long long>(c.batch), static_cast<long long>(c.kv_heads),
        static_cast<long long>(c.heads()), static_cast<long long>(c.queries), static_cast<long long>(c.position),
        static_cast<long long>(c.keys), static_cast<long long>(c.dim), static_cast<long long>(c.value_dim),
        static_cast<long long>(c.gap), static_cast<long long>(c.intervals), c.causal, c.blocks, c.sinks, c.lse, c.softcap,
        c.threads);
    const int64_t kv_rows = c.batch * c.kv_heads * c.keys;
    const Mask mask = draw_mask(random, c);
    Rows q = Rows::random(random, c.dtype, c.rows(), c.dim, c.gap, 2.0);
    Rows k = Rows::random(random, c.dtype, kv_rows, c.dim, c.gap, 2.0);
    Rows v = Rows::random(random, c.dtype, kv_rows, c.value_dim, c.gap, 1.0);
    Rows grad = Rows::random(random, c.dtype, c.rows(), c.value_dim, c.gap, 1.0);
    std::vector<float> sinks, grad_lse;
    for (int64_t i = 0; i < c.heads(); i++) sinks.push_back(static_cast<float>(random.between(-2.0, 2.0)));
    for (int64_t i = 0; i < c.rows(); i++) grad_lse.push_back(c.lse ? static_cast<float>(random.between(-1.0, 1.0)) : 0.0f);
    // Keys that no query sees, of any head of theirs, hold NaN.
    for (int64_t row = 0; row < kv_rows; row++) {
        const int64_t key = row % c.keys, head = row / c.keys;
        bool seen = false;
        for (int64_t i = 0; i < c.groups * c.queries; i++) {
            seen = seen || mask.seen[(head * c.groups * c.queries + i) * c.keys + key];
        }
        for (int64_t d = 0; !seen && d < c.dim; d++) k.set(row, d, std::nan(""));
        for (int64_t d = 0; !seen && d < c.value_dim; d++) v.set(row, d, std::nan(""));
    }
    const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(c.dim)));
    const Truth want = truth_of(c, mask, q, k, v, grad, grad_lse, sinks, static_cast<double>(scale));
    Array<int32_t> intervals(mask.intervals), blocks(mask.blocks);
    Memory bits(static_cast<int64_t>(mask.bits.size()), 1);
    std::copy(mask.bits.begin(), mask.bits.end(), bits.data());
    Array<float> of_sinks(sinks), of_lse(grad_lse);
    for (Rows* each : {&q, &k, &v, &grad}) each->memory.freeze();
    for (Array<float>* each : {&of_sinks, &of_lse}) each->freeze();
    Rows out[2], grad_q[2], grad_k[2], grad_v[2];
    for (int turn = 0; turn < 2; turn++) {
        out[turn] = Rows(c.dtype, c.rows(), c.value_dim, c.gap);
        grad_q[turn] = Rows(c.dtype, c.rows(), c.dim, c.gap);
        grad_k[turn] = Rows(c.dtype, kv_rows, c.dim, c.gap);
        grad_v[turn] = Rows(c.dtype, kv_rows, c.value_dim, c.gap);
        Array<float> largest(c.rows()), total(c.rows()), lse(c.rows()), common(c.rows());
        struct kpt_attention args{
            view(q, c.heads(), c.queries),
            view(k, c.kv_heads, c.keys),
            view(v, c.kv_heads, c.keys),
            view(out[turn], c.heads(), c.queries),
            largest.data(),
            total.data(),
            lse.data(),
            c.intervals > 0 ? intervals.data() : nullptr,
            0,
            0,
            c.intervals,
            c.blocks ? blocks.data() : nullptr,
            0,
            0,
            bits.data(),
            c.sinks ? of_sinks.data() : nullptr,
            c.batch,
            c.heads(),
            c.kv_heads,
            c.queries,
            c.keys,
            c.dim,
            c.value_dim,
            c.position,
            c.causal,
            scale,
            static_cast<float>(c.softcap),
            c.threads};
        CHECK(kernels.attention_forward(&args) == KPT_OK, "the forward returned an error");
        const std::vector<float> got = lse.values();
        check("lse", KPT_FLOAT32, std::vector<double>(got.begin(), got.end()), want.lse);
        args.lse = nullptr;
        const struct kpt_attention_backward given{
            args,
            view(grad, c.heads(), c.queries),
            c.lse ? of_lse.data() : nullptr,
            common.data(),
            view(grad_q[turn], c.heads(), c.queries),
            view(grad_k[turn], c.kv_heads, c.keys),
            view(grad_v[turn], c.kv_heads, c.keys)};
        CHECK(kernels.attention_backward(&given) == KPT_OK, "the backward returned an error");
    }
    check("out", c.dtype, out[0].read("out"), want.out);
    check("grad_q", c.dtype, grad_q[0].read("grad_q"), want.grad_q);
    check("grad_k", c.dtype, grad_k[0].read("grad_k"), want.grad_k);
    check("grad_v", c.dtype, grad_v[0].read("grad_v"), want.grad_v);
    for (const Rows* each : {out, grad_q, grad_k, grad_v}) compare_bits("a repeated result", each[0].memory, each[1].memory);
}

}  // namespace

void test_attention() {
    Random random(8);
    constexpr int64_t sizes[] = {1, 2, 3, 15, 16, 17, 31, 33, 63, 127, 128, 129, 140, 257};
    constexpr int64_t dims[] = {1, 2, 5, 8, 15, 16, 17, 32, 33, 64, 70, 128, 200, 256};
    for (int dtype : {KPT_FLOAT32, KPT_BFLOAT16, KPT_FLOAT16}) {
        for (int i = 0; i < 40; i++) {
            Case c{};
            c.dtype = dtype;
            c.batch = 1 + random.below(2);
            c.kv_heads = 1 + random.below(2);
            c.groups = 1 + random.below(2);
            c.queries = random.one_of(sizes);
            c.keys = random.one_of(sizes);
            c.dim = random.one_of(dims);
            c.value_dim = random.one_of(dims);
            c.gap = random.coin() ? 3 : 0;
            c.intervals = random.coin() ? random.below(4) : 0;
            c.causal = random.coin();
            c.blocks = random.below(4) == 0;
            c.sinks = random.coin();
            c.lse = random.coin();
            c.position = random.coin() ? c.keys - c.queries : random.below(9) - 4;
            c.softcap = random.below(3) == 0 ? 1.5 : 0.0;
            c.threads = random.coin() ? 3 : 1;
            check_attention(random, c);
        }
    }
}

}  // namespace test
