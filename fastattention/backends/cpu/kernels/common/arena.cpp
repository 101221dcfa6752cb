#include "common/arena.hpp"

#include <pthread.h>
#include <sys/mman.h>

#include <cstdlib>
#include <mutex>

namespace fastattention {
namespace {

// The most that is kept for the next call: enough for long prompts, but no burden. Larger buffers are freed at once.
constexpr size_t kKeptBytes = size_t{64} << 20;
constexpr size_t kHugePage = size_t{2} << 20;

std::mutex mutex;
char* kept = nullptr;
size_t kept_size = 0;

// The mutex is held during a fork: in the child it would otherwise stay locked by a thread that does not exist there.
void lock() { mutex.lock(); }
void unlock() { mutex.unlock(); }
const bool keeps_buffers = pthread_atfork(lock, unlock, unlock) == 0;

char* allocate(size_t bytes) {
    if (bytes < kHugePage) return static_cast<char*>(std::aligned_alloc(64, bytes));
    char* data = static_cast<char*>(std::aligned_alloc(kHugePage, bytes));
#ifdef MADV_HUGEPAGE
    if (data != nullptr) madvise(data, bytes, MADV_HUGEPAGE);  // only advice: failure costs nothing but speed
#endif
    return data;
}

}  // namespace

Arena::Arena(size_t bytes) {
    const size_t alignment = bytes < kHugePage ? 64 : kHugePage;
    size_ = (bytes + alignment - 1) / alignment * alignment;
    if (keeps_buffers) {
        std::lock_guard<std::mutex> lock(mutex);
        if (kept != nullptr && kept_size >= size_) {
            data_ = kept;
            size_ = kept_size;
            kept = nullptr;
        }
    }
    if (data_ == nullptr) data_ = allocate(size_);
}

Arena::~Arena() {
    char* unused = data_;
    if (keeps_buffers && data_ != nullptr && size_ <= kKeptBytes) {
        std::lock_guard<std::mutex> lock(mutex);
        if (kept == nullptr || kept_size < size_) {
            unused = kept;
            kept = data_;
            kept_size = size_;
        }
    }
    std::free(unused);
}

}  // namespace fastattention
