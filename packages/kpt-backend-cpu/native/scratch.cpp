#include "scratch.h"

#include <stdlib.h>
#include <sys/mman.h>

#include <atomic>

namespace kpt {

namespace {

constexpr int64_t huge_page = int64_t{1} << 21;
constexpr int64_t cache_line = 64;

// The block of huge pages that was used last, unless it is larger than this, is kept for the next call: to clear fresh ones
// takes the operating system a tenth of a training step. Its first bytes say how large it is.
#if !defined(__SANITIZE_ADDRESS__) && defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t most_kept = 0;  // so that what lies outside of a block, or was never written, is noticed
#else
constexpr int64_t most_kept = int64_t{1} << 27;
#endif
std::atomic<int64_t*> kept{nullptr};

// Huge pages for `bytes` or more, which is set to how many there are; null if there are none.
void* take_pages(int64_t& bytes) {
    int64_t* own = kept.exchange(nullptr, std::memory_order_acquire);
    if (own != nullptr && *own >= bytes) {
        bytes = *own;
        return own;
    }
    free(own);
    bytes = (bytes + huge_page - 1) / huge_page * huge_page;
    void* data = nullptr;
    if (posix_memalign(&data, huge_page, bytes) != 0) return nullptr;
#ifdef MADV_HUGEPAGE
    madvise(data, bytes, MADV_HUGEPAGE);
#endif
    return data;
}

void give_pages_back(void* data, int64_t bytes) {
    int64_t* own = static_cast<int64_t*>(data);
    if (own != nullptr && bytes <= most_kept) {
        *own = bytes;
        own = kept.exchange(own, std::memory_order_acq_rel);
    }
    free(own);
}

}  // namespace

Scratch::Scratch(int64_t bytes) : data_(nullptr), bytes_(bytes > 0 ? bytes : 1) {
    if (bytes_ >= huge_page) data_ = take_pages(bytes_);
    else if (posix_memalign(&data_, cache_line, bytes_) != 0) data_ = nullptr;
}

Scratch::~Scratch() {
    if (bytes_ >= huge_page) give_pages_back(data_, bytes_);
    else free(data_);
}

}  // namespace kpt
