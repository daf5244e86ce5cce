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
    // What is added to scores: a bias of each sequence or of all; slopes; a table of so many distances either way.
    bool bias, own_bias, slopes, table;
    int64_t far;
    double dropout;

    int64_t heads() const { return kv_heads * groups; }
    int64_t biases() const { return bias ? (own_bias ? batch : 1) * heads() * queries : 0; }
    bool adds() const { return bias || slopes || table; }
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

// What is added, and which weights are dropped.
struct Added {
    Rows bias;
    std::vector<float> slopes, table;
    int64_t seed, offset, first_row;

    // The generator is SplitMix64 of a counter.
    static uint64_t mixed(uint64_t x) {
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
        x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
        return x ^ (x >> 31);
    }
    double kept(const Case& c, int64_t row, int64_t key) const {
        if (c.dropout == 0.0) return 1.0;
        constexpr uint64_t step = 0x9e3779b97f4a7c15;
        const uint64_t start = mixed(static_cast<uint64_t>(seed) * step + static_cast<uint64_t>(offset));
        const uint64_t own = mixed(start + static_cast<uint64_t>(first_row + row) * step);
        const uint64_t drawn = mixed(own + static_cast<uint64_t>(key) * step) >> 40;
        return drawn >= static_cast<uint64_t>(c.dropout * (1 << 24)) ? 1.0 / (1.0 - c.dropout) : 0.0;
    }
    int64_t distance(const Case& c, int64_t row, int64_t key) const { return key - row % c.queries - c.position; }
    int64_t place(const Case& c, int64_t row, int64_t key) const {
        const int64_t at = std::min(std::max(distance(c, row, key), -c.far), c.far) + c.far;
        return row / c.queries % c.heads() * (2 * c.far + 1) + at;
    }
    double of(const Case& c, int64_t row, int64_t key) const {
        double sum = 0.0;
        if (c.bias) sum += bias.values[row % c.biases() * c.keys + key];
        if (c.slopes) sum -= static_cast<double>(slopes[row / c.queries % c.heads()] * std::abs(distance(c, row, key)));
        if (c.table) sum += static_cast<double>(table[place(c, row, key)]);
        return sum;
    }
};

// Everything in float64; of what is added the gradients of each sequence's.
struct Truth {
    std::vector<double> out, lse, grad_q, grad_k, grad_v, grad_bias, grad_slopes, grad_table;
};

Truth truth_of(
    const Case& c, const Mask& mask, const Added& added, const Rows& q, const Rows& k, const Rows& v, const Rows& grad,
    const std::vector<float>& grad_lse, const std::vector<float>& sinks, double scale) {
    Truth t;
    const int64_t kv_rows = c.batch * c.kv_heads * c.keys;
    t.out.assign(c.rows() * c.value_dim, 0.0);
    t.lse.assign(c.rows(), -INFINITY);
    t.grad_q.assign(c.rows() * c.dim, 0.0);
    t.grad_k.assign(kv_rows * c.dim, 0.0);
    t.grad_v.assign(kv_rows * c.value_dim, 0.0);
    t.grad_bias.assign(c.rows() * c.keys, 0.0);
    t.grad_slopes.assign(c.batch * c.heads(), 0.0);
    t.grad_table.assign(c.batch * c.heads() * (2 * c.far + 1), 0.0);
    std::vector<double> scores(c.keys), slopes(c.keys), changes(c.keys);
    for (int64_t row = 0; row < c.rows(); row++) {
        const int64_t head = row / c.queries % c.heads(), batch = row / c.queries / c.heads();
        const int64_t first = (batch * c.kv_heads + head / c.groups) * c.keys;
        const auto seen = [&](int64_t key) { return mask.seen[row * c.keys + key] && added.of(c, row, key) > -INFINITY; };
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
            scores[key] += added.of(c, row, key);
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
            const double kept = added.kept(c, row, key), weight = scores[key] * kept;
            for (int64_t d = 0; d < c.value_dim; d++) {
                const double value = v.values[(first + key) * c.value_dim + d], given = grad.values[row * c.value_dim + d];
                t.out[row * c.value_dim + d] += weight * value;
                t.grad_v[(first + key) * c.value_dim + d] += weight * given;
                changes[key] += given * value * kept;
            }
            common += scores[key] * changes[key];
        }
        for (int64_t key = 0; key < c.keys; key++) {
            if (!seen(key)) continue;
            const double of_score = scores[key] * (changes[key] - common), change = of_score * slopes[key] * scale;
            t.grad_bias[row * c.keys + key] = of_score;
            const int64_t of_head = row / c.queries, distance = added.distance(c, row, key);
            t.grad_slopes[of_head] -= of_score * static_cast<double>(std::abs(distance));
            if (c.table) t.grad_table[of_head / c.heads() * c.heads() * (2 * c.far + 1) + added.place(c, row, key)] += of_score;
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
        "%lld and %lld, gap %lld, %lld intervals, causal %d, blocks %d, sinks %d, lse %d, softcap %g, %d threads, "
        "bias %d of each %d, slopes %d, table %d of %lld, dropout %g",
        name_of(c.dtype), static_cast<long long>(c.batch), static_cast<long long>(c.kv_heads),
        static_cast<long long>(c.heads()), static_cast<long long>(c.queries), static_cast<long long>(c.position),
        static_cast<long long>(c.keys), static_cast<long long>(c.dim), static_cast<long long>(c.value_dim),
        static_cast<long long>(c.gap), static_cast<long long>(c.intervals), c.causal, c.blocks, c.sinks, c.lse, c.softcap,
        c.threads, c.bias, c.own_bias, c.slopes, c.table, static_cast<long long>(c.far), c.dropout);
    const int64_t kv_rows = c.batch * c.kv_heads * c.keys;
    const Mask mask = draw_mask(random, c);
    Rows q = Rows::random(random, c.dtype, c.rows(), c.dim, c.gap, 2.0);
    Rows k = Rows::random(random, c.dtype, kv_rows, c.dim, c.gap, 2.0);
    Rows v = Rows::random(random, c.dtype, kv_rows, c.value_dim, c.gap, 1.0);
    Rows grad = Rows::random(random, c.dtype, c.rows(), c.value_dim, c.gap, 1.0);
    std::vector<float> sinks, grad_lse;
    for (int64_t i = 0; i < c.heads(); i++) sinks.push_back(static_cast<float>(random.between(-2.0, 2.0)));
    for (int64_t i = 0; i < c.rows(); i++) grad_lse.push_back(c.lse ? static_cast<float>(random.between(-1.0, 1.0)) : 0.0f);
    Added added{Rows::random(random, random.coin() ? c.dtype : KPT_FLOAT32, c.biases(), c.keys, c.gap, 2.0), {}, {}, 0, 0, 0};
    for (int64_t i = 0; i < c.biases() * c.keys; i++) {
        if (random.below(4) == 0) added.bias.set(i / c.keys, i % c.keys, -INFINITY);
    }
    for (int64_t i = 0; i < c.heads(); i++) added.slopes.push_back(static_cast<float>(random.between(0.0, 0.5)));
    for (int64_t i = 0; i < c.heads() * (2 * c.far + 1); i++) added.table.push_back(static_cast<float>(random.between(-1.0, 1.0)));
    added.seed = random.below(1 << 30) - (1 << 29);
    added.offset = random.below(1 << 30);
    added.first_row = random.below(1000);
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
    const Truth want = truth_of(c, mask, added, q, k, v, grad, grad_lse, sinks, static_cast<double>(scale));
    Array<int32_t> intervals(mask.intervals), blocks(mask.blocks);
    Memory bits(static_cast<int64_t>(mask.bits.size()), 1);
    std::copy(mask.bits.begin(), mask.bits.end(), bits.data());
    Array<float> of_sinks(sinks), of_lse(grad_lse), slopes(added.slopes), table(added.table);
    for (Rows* each : {&q, &k, &v, &grad, &added.bias}) each->memory.freeze();
    for (Array<float>* each : {&of_sinks, &of_lse, &slopes, &table}) each->freeze();
    Rows out[2], grad_q[2], grad_k[2], grad_v[2];
    for (int turn = 0; turn < 2; turn++) {
        out[turn] = Rows(c.dtype, c.rows(), c.value_dim, c.gap);
        grad_q[turn] = Rows(c.dtype, c.rows(), c.dim, c.gap);
        grad_k[turn] = Rows(c.dtype, kv_rows, c.dim, c.gap);
        grad_v[turn] = Rows(c.dtype, kv_rows, c.value_dim, c.gap);
        Array<float> largest(c.rows()), total(c.rows()), lse(c.rows()), common(c.rows());
        struct kpt_attention args {
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
            {},
            c.slopes ? slopes.data() : nullptr,
            c.table ? table.data() : nullptr,
            c.far,
            c.batch,
            c.heads(),
            c.kv_heads,
            c.queries,
            c.keys,
            c.dim,
            c.value_dim,
            c.position,
            added.seed,
            added.offset,
            added.first_row,
            static_cast<int32_t>(c.dropout * (1 << 24)),
            c.dropout > 0.0 ? static_cast<float>(1.0 / (1.0 - c.dropout)) : 0.0f,
            c.causal,
            scale,
            static_cast<float>(c.softcap),
            c.threads};
        if (c.bias) {
            args.bias = view(added.bias, c.heads(), c.queries);
            if (!c.own_bias) args.bias.stride_b = 0;
        }
        CHECK(kernels.attention_forward(&args) == KPT_OK, "the forward returned an error");
        const std::vector<float> got = lse.values();
        check("lse", KPT_FLOAT32, std::vector<double>(got.begin(), got.end()), want.lse);
        args.lse = nullptr;
        // The kernel writes the gradient of a bias where a query sees a key.
        const std::vector<float> zeros(c.bias ? c.rows() * c.keys : 0, 0.0f);
        const int64_t parts = c.batch * c.heads() * ((c.queries + 127) / 128);
        Array<float> grad_bias(zeros), grad_slopes(parts), grad_table(parts * (2 * c.far + 1));
        const struct kpt_attention_backward given{
            args,
            view(grad, c.heads(), c.queries),
            c.lse ? of_lse.data() : nullptr,
            common.data(),
            view(grad_q[turn], c.heads(), c.queries),
            view(grad_k[turn], c.kv_heads, c.keys),
            view(grad_v[turn], c.kv_heads, c.keys),
            c.bias ? grad_bias.data() : nullptr,
            c.slopes ? grad_slopes.data() : nullptr,
            c.table ? grad_table.data() : nullptr};
        CHECK(kernels.attention_backward(&given) == KPT_OK, "the backward returned an error");
        const auto summed = [&](const std::vector<float>& all, int64_t width) {
            std::vector<double> sums(c.batch * c.heads() * width, 0.0);
            const int64_t tiles = (c.queries + 127) / 128;
            for (size_t i = 0; i < all.size(); i++) {
                const auto at = static_cast<int64_t>(i);
                sums[at / width / tiles * width + at % width] += static_cast<double>(all[i]);
            }
            return sums;
        };
        const std::vector<float> of_bias = grad_bias.values();
        // Sums of all scores' gradients, rounded as these are.
        if (c.bias) check("grad_bias", c.dtype, std::vector<double>(of_bias.begin(), of_bias.end()), want.grad_bias);
        if (c.slopes) check("grad_slopes", c.dtype, summed(grad_slopes.values(), 1), want.grad_slopes);
        if (c.table) check("grad_table", c.dtype, summed(grad_table.values(), 2 * c.far + 1), want.grad_table);
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
            c.softcap = 0.0;
            c.bias = random.coin();
            c.own_bias = random.coin();
            c.slopes = random.below(3) == 0;
            c.table = random.below(3) == 0;
            c.far = random.below(3) == 0 ? 0 : random.below(300);
            c.dropout = random.coin() ? 0.25 : 0.0;
            if (c.adds() || c.dropout > 0.0) check_attention(random, c);
        }
    }
}

}  // namespace test
