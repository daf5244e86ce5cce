// Sorting pairs by expert: a counting sort whose counters are the offsets themselves, so that it needs no memory.
#include "kpt_cpu.h"

namespace {

template <class Id>
void sort(const struct kpt_sort& args) {
    const Id* index = static_cast<const Id*>(args.index);
    int32_t rest = 0;
    // Choosing a counter instead of a branch: with experts on several machines, which ids are known is random.
    const auto counter = [&](Id id) {
        return static_cast<uint64_t>(id) < static_cast<uint64_t>(args.experts) ? args.offsets + id : &rest;
    };
    for (int64_t e = 0; e < args.experts; e++) args.offsets[e] = 0;
    for (int64_t pair = 0; pair < args.pairs; pair++) ++*counter(index[pair]);
    int32_t end = 0;
    for (int64_t e = 0; e < args.experts; e++) {
        const int32_t count = args.offsets[e];
        args.offsets[e] = end;
        end += count;
    }
    rest = end;
    for (int64_t pair = 0; pair < args.pairs; pair++) {
        args.order[(*counter(index[pair]))++] = static_cast<int32_t>(pair);
    }
}

}  // namespace

int kpt_sort(const struct kpt_sort* args) {
    if (args->index_is_int64) sort<int64_t>(*args);
    else sort<int32_t>(*args);
    return KPT_OK;
}
