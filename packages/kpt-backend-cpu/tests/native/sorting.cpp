#include "tensors.h"

namespace test {

namespace {

template <class Id>
void check_sort(Random& random, int64_t pairs, int64_t experts) {
    begin_case(
        "kpt_sort of %lld pairs by %lld experts, ids of %zu bytes", static_cast<long long>(pairs),
        static_cast<long long>(experts), sizeof(Id));
    const bool far = random.coin();
    std::vector<Id> ids;
    for (int64_t i = 0; i < pairs; i++) {
        const int64_t huge = sizeof(Id) == 8 ? (int64_t{1} << 32) + random.below(3) : int64_t{0x7fffffff};
        ids.push_back(
            static_cast<Id>(
                far && random.below(5) == 0 ? (random.coin() ? huge : -huge) : random.below(experts + 4) - 2));
    }
    std::vector<int32_t> order, rest, offsets;
    for (int64_t e = 0; e < experts; e++) {
        for (int64_t i = 0; i < pairs; i++) {
            if (ids[i] == e) order.push_back(static_cast<int32_t>(i));
        }
        offsets.push_back(static_cast<int32_t>(order.size()));
    }
    for (int64_t i = 0; i < pairs; i++) {
        if (ids[i] < 0 || ids[i] >= experts) order.push_back(static_cast<int32_t>(i));
    }
    Array<Id> index(ids);
    index.freeze();
    Array<int32_t> got_order(pairs), got_offsets(experts);
    const struct kpt_sort args{index.data(), sizeof(Id) == 8, got_order.data(), got_offsets.data(), pairs, experts};
    CHECK(kernels.sort(&args) == KPT_OK, "it returned an error");
    CHECK(got_order.values() == order, "the order is wrong");
    CHECK(got_offsets.values() == offsets, "the offsets are wrong");
}

}  // namespace

void test_sort() {
    Random random(1);
    for (int64_t pairs : {0, 1, 2, 3, 7, 8, 64, 65, 500}) {
        for (int64_t experts : {1, 2, 3, 16, 65, 300}) {
            check_sort<int64_t>(random, pairs, experts);
            check_sort<int32_t>(random, pairs, experts);
        }
    }
}

}  // namespace test
