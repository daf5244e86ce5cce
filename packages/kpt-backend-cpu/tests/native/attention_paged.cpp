#include <algorithm>
#include <cmath>

#include "tensors.h"

namespace test {

namespace {

struct Case {
    int dtype, cache_dtype;
    int64_t sequences, kv_heads, groups, page_size, most_pages, most_queries, dim, value_dim, gap, window;
    bool causal, sinks, scales, paged, uniform;  // uniform: sequences have as many queries, and see all keys
    double softcap;
    int threads;
    bool bias, slopes, table;
    int64_t far;

    int64_t heads() const { return kv_heads * groups; }
};

void check_paged(Random& random, const Case& c) {
    begin_case(
        "kpt_attention_paged of %s and %s, %lld sequences of %lld queries at most, heads %lld of %lld, pages %lld of %lld, "
        "dims %lld and %lld, gap %lld, window %lld, causal %d, sinks %d, scales %d, table %d, uniform %d, softcap %g, %d threads, "
        "bias %d, slopes %d, distances %d of %lld",
        name_of(c.dtype), name_of(c.cache_dtype), static_cast<long long>(c.sequences), static_cast<long long>(c.most_queries),
        static_cast<long long>(c.kv_heads), static_cast<long long>(c.heads()), static_cast<long long>(c.most_pages),
        static_cast<long long>(c.page_size), static_cast<long long>(c.dim), static_cast<long long>(c.value_dim),
        static_cast<long long>(c.gap), static_cast<long long>(c.window), c.causal, c.sinks, c.scales, c.paged, c.uniform,
        c.softcap, c.threads, c.bias, c.slopes, c.table, static_cast<long long>(c.far));
    // Without a table a sequence is one page.
    const int64_t page_size = c.paged ? c.page_size : c.page_size * c.most_pages, most_pages = c.paged ? c.most_pages : 1;
    const int64_t pages = c.sequences * most_pages + (c.paged ? 2 : 0), slots = pages * page_size;
    std::vector<int32_t> table, ends{0}, spans, places;
    std::vector<int64_t> order;
    for (int64_t i = 0; i < pages; i++) order.push_back(i);
    for (int64_t i = pages - 1; c.paged && i > 0; i--) std::swap(order[i], order[random.below(i + 1)]);
    std::vector<bool> seen(slots, false);
    for (int64_t s = 0; s < c.sequences; s++) {
        const int64_t length = c.uniform ? page_size : random.below(page_size * most_pages + 1);
        const int64_t queries = c.uniform ? c.most_queries : random.below(c.most_queries + 1);
        for (int64_t i = 0; i < queries; i++) {
            const int64_t position = length - queries + i;
            const int64_t past = std::max<int64_t>(c.causal ? position + 1 : length, 0);
            const int64_t first = c.window > 0 ? std::max<int64_t>(position + 1 - c.window, 0) : 0;
            places.push_back(static_cast<int32_t>(position));
            spans.push_back(static_cast<int32_t>(first));
            spans.push_back(static_cast<int32_t>(past));
            for (int64_t key = first; key < past; key++) seen[order[s * most_pages + key / page_size] * page_size + key % page_size] = true;
        }
        ends.push_back(ends.back() + static_cast<int32_t>(queries));
    }
    for (int64_t s = 0; s < c.sequences; s++) {
        for (int64_t i = 0; i < most_pages; i++) {  // a page that nobody sees may be any number
            bool any = false;
            for (int64_t place = 0; place < page_size; place++) any = any || seen[order[s * most_pages + i] * page_size + place];
            table.push_back(any ? static_cast<int32_t>(order[s * most_pages + i]) : 1 << 30);
        }
    }
    const int64_t tokens = ends.back();
    Rows q = Rows::random(random, c.dtype, tokens * c.heads(), c.dim, c.gap, 2.0);
    Rows k = Rows::random(random, c.cache_dtype, slots * c.kv_heads, c.dim, c.gap, 2.0);
    Rows v = Rows::random(random, c.cache_dtype, slots * c.kv_heads, c.value_dim, c.gap, 1.0);
    for (int64_t row = 0; row < slots * c.kv_heads; row++) {
        for (int64_t d = 0; !seen[row / c.kv_heads] && d < c.dim; d++) k.set(row, d, std::nan(""));
        for (int64_t d = 0; !seen[row / c.kv_heads] && d < c.value_dim; d++) v.set(row, d, std::nan(""));
    }
    std::vector<float> sinks, k_scale, v_scale;
    for (int64_t i = 0; i < c.heads(); i++) sinks.push_back(static_cast<float>(random.between(-2.0, 2.0)));
    for (int64_t i = 0; i < c.kv_heads; i++) k_scale.push_back(c.scales ? static_cast<float>(random.between(0.5, 1.5)) : 1.0f);
    for (int64_t i = 0; i < c.kv_heads; i++) v_scale.push_back(c.scales ? static_cast<float>(random.between(0.5, 1.5)) : 1.0f);
    // A bias lies as queries do; slopes are of each sequence and head.
    const int64_t most_keys = page_size * most_pages, width = 2 * c.far + 1;
    Rows bias = Rows::random(random, random.coin() ? c.dtype : KPT_FLOAT32, c.bias ? tokens * c.heads() : 0, most_keys, c.gap, 2.0);
    // One that the heads share may hide the first and the last keys of a sequence.
    const bool shared = c.bias && random.below(3) > 0;
    for (int64_t s = 0; shared && s < c.sequences; s++) {
        const int64_t begin = random.below(4), end = most_keys - random.below(most_keys / 2 + 1);
        for (int64_t row = ends[s] * c.heads(); row < ends[s + 1] * c.heads(); row++) {
            for (int64_t key = 0; key < most_keys; key++) {
                const bool hidden = key < begin || key >= end;
                bias.set(row, key, hidden ? -INFINITY : bias.values[row / c.heads() * c.heads() * most_keys + key]);
            }
        }
    }
    std::vector<float> slopes, distances;
    for (int64_t i = 0; i < c.sequences * c.heads(); i++) slopes.push_back(static_cast<float>(random.between(0.0, 0.5)));
    for (int64_t i = 0; i < c.heads() * width; i++) distances.push_back(static_cast<float>(random.between(-1.0, 1.0)));
    const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(c.dim)));
    std::vector<double> want(tokens * c.heads() * c.value_dim, 0.0), want_lse(tokens * c.heads(), -INFINITY);
    for (int64_t s = 0; s < c.sequences; s++) {
        for (int64_t row = ends[s] * c.heads(); row < ends[s + 1] * c.heads(); row++) {
            const int64_t head = row % c.heads(), kv_head = head / c.groups, query = row / c.heads();
            std::vector<double> scores;
            double most = c.sinks ? static_cast<double>(sinks[head]) : -INFINITY;
            const auto place = [&](int64_t key) {
                return (order[s * most_pages + key / page_size] * page_size + key % page_size) * c.kv_heads + kv_head;
            };
            for (int64_t key = spans[2 * query]; key < spans[2 * query + 1]; key++) {
                double sum = 0.0;
                for (int64_t d = 0; d < c.dim; d++) sum += q.values[row * c.dim + d] * k.values[place(key) * c.dim + d];
                sum *= static_cast<double>(scale) * static_cast<double>(k_scale[kv_head]);
                scores.push_back(c.softcap > 0.0 ? std::tanh(sum / c.softcap) * c.softcap : sum);
                const int64_t distance = key - places[query], at = std::min(std::max(distance, -c.far), c.far) + c.far;
                if (c.bias) scores.back() += bias.values[row * most_keys + key];
                if (c.slopes) scores.back() -= static_cast<double>(slopes[s * c.heads() + head] * std::abs(distance));
                if (c.table) scores.back() += static_cast<double>(distances[head * width + at]);
                most = std::max(most, scores.back());
            }
            if (most == -INFINITY) continue;
            double total = c.sinks ? std::exp(static_cast<double>(sinks[head]) - most) : 0.0;
            for (double& each : scores) total += each = std::exp(each - most);
            want_lse[row] = most + std::log(total);
            for (size_t i = 0; i < scores.size(); i++) {
                const int64_t at = place(spans[2 * query] + static_cast<int64_t>(i)) * c.value_dim;
                for (int64_t d = 0; d < c.value_dim; d++) {
                    want[row * c.value_dim + d] += scores[i] / total * v.values[at + d] * static_cast<double>(v_scale[kv_head]);
                }
            }
        }
    }
    Array<int32_t> of_table(table), of_ends(ends), of_spans(spans), of_places(places);
    Array<float> of_slopes(slopes), of_distances(distances);
    bias.memory.freeze();
    Array<float> of_sinks(sinks), of_k(k_scale), of_v(v_scale);
    for (Rows* each : {&q, &k, &v}) each->memory.freeze();
    Rows out[2];
    for (Rows& each : out) {
        each = Rows(c.dtype, tokens * c.heads(), c.value_dim, c.gap);
        Array<float> lse(tokens * c.heads());
        const auto heads = [&](const Rows& x) { return kpt_heads{x.memory.data(), c.most_queries * c.heads() * x.stride, x.stride, c.heads() * x.stride, x.dtype}; };
        const auto paged = [&](const Rows& x) {
            return kpt_pages{x.memory.data(), page_size * c.kv_heads * x.stride, c.kv_heads * x.stride, x.stride, x.dtype};
        };
        kpt_heads of_bias = c.bias ? heads(bias) : kpt_heads{};
        if (shared) of_bias.stride_h = 0;
        const struct kpt_attention_paged args{
            heads(q), heads(each), paged(k), paged(v), lse.data(), c.paged ? of_table.data() : nullptr, most_pages, page_size,
            c.uniform ? nullptr : of_ends.data(), c.uniform ? nullptr : of_spans.data(), c.sinks ? of_sinks.data() : nullptr, c.scales ? of_k.data() : nullptr,
            c.scales ? of_v.data() : nullptr, of_bias, c.slopes ? of_slopes.data() : nullptr, c.heads(),
            c.table ? of_distances.data() : nullptr, c.far, c.uniform ? nullptr : of_places.data(), c.sequences, c.uniform ? c.most_queries : 0, c.heads(),
            c.kv_heads, c.dim, c.value_dim, page_size - c.most_queries, scale, static_cast<float>(c.softcap), c.causal, c.threads};
        CHECK(kernels.attention_paged(&args) == KPT_OK, "it returned an error");
        std::vector<float> got = lse.values();
        if (c.uniform) {  // heads come before queries
            for (int64_t i = 0; i < tokens * c.heads(); i++) {
                const int64_t query = i / c.heads(), head = i % c.heads(), s = query / c.most_queries;
                got[i] = lse.values()[(s * c.heads() + head) * c.most_queries + query % c.most_queries];
            }
        }
        std::vector<double> allowed;
        for (double sum : want_lse) allowed.push_back(2e-5 * (1.0 + (std::isfinite(sum) ? std::fabs(sum) : 0.0)));
        compare("lse", std::vector<double>(got.begin(), got.end()), want_lse, allowed);
        const double part = c.dtype == KPT_FLOAT32 ? 2e-5 : rounding_of(c.dtype) * 2.0;
        compare("out", each.read("out"), want, std::vector<double>(want.size(), part * 3.0));
    }
    compare_bits("a repeated result", out[0].memory, out[1].memory);
}

}  // namespace

void test_attention_paged() {
    Random random(9);
    constexpr int64_t sizes[] = {1, 2, 3, 7, 16, 33, 64, 65, 130};
    constexpr int64_t dims[] = {1, 2, 5, 8, 15, 16, 17, 32, 33, 64, 70, 128, 200, 300};
    for (int dtype : {KPT_FLOAT32, KPT_BFLOAT16, KPT_FLOAT16}) {
        for (int i = 0; i < 40; i++) {
            Case c{};
            c.dtype = dtype;
            c.cache_dtype = random.below(3) > 0 ? dtype : random.coin() ? KPT_FLOAT8_E4M3FN : KPT_FLOAT8_E5M2;
            c.sequences = random.below(4);
            c.kv_heads = 1 + random.below(2);
            c.groups = 1 + random.below(6);
            c.page_size = random.one_of(sizes);
            c.most_pages = 1 + random.below(1200 / c.page_size < 12 ? 1200 / c.page_size : 12);
            c.most_queries = random.coin() ? 1 : 3;
            c.dim = random.one_of(dims);
            c.value_dim = random.one_of(dims);
            c.gap = random.coin() ? 3 : 0;
            c.causal = random.below(4) > 0;
            c.window = c.causal && random.coin() ? 1 + random.below(90) : 0;
            c.sinks = random.coin();
            c.scales = random.coin();
            c.paged = random.coin();
            c.uniform = !c.paged && c.window == 0 && random.coin();
            c.softcap = random.below(3) == 0 ? 1.5 : 0.0;
            c.threads = random.coin() ? 3 : 1;
            check_paged(random, c);
            c.bias = random.coin();
            c.slopes = random.coin();
            c.table = !c.paged && random.coin();
            c.far = random.below(3) == 0 ? 0 : random.below(300);
            check_paged(random, c);
        }
    }
}

}  // namespace test
