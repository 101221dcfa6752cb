#include "attention/prepared.hpp"

#include <pthread.h>

#include <cstring>
#include <mutex>
#include <new>

#include "attention/driver.hpp"
#include "attention/sequences.hpp"

namespace fastattention {
namespace {

// In every dtype of results, a value with all bits set is a NaN.
constexpr int kNaNByte = 0xff;

std::mutex one_at_a_time;  // held by the call that runs

// A forked child does not have the thread that holds the mutex.
void release_in_child() { new (&one_at_a_time) std::mutex; }
[[maybe_unused]] const bool registered = pthread_atfork(nullptr, nullptr, release_in_child) == 0;

}  // namespace

void Prepared::run() {
    std::lock_guard<std::mutex> lock(one_at_a_time);
    failed_ = !forward(kernels_, params_);
    if (failed_) spoil();
}

void Prepared::spoil() {
    const FaAttentionParams& p = params_;
    const int64_t element_size = size_of(p.dtype);
    for (int64_t batch = 0; batch < p.batch_size; ++batch)
        for (int64_t head = 0; head < p.nheads; ++head) {
            float* lse = p.lse + batch * p.lse_stride_batch + head * p.lse_stride_head;
            std::memset(lse, kNaNByte, p.seqlen_q * sizeof(float));
            for (int64_t row = 0; row < p.seqlen_q; ++row) {
                const int64_t at = batch * p.out_stride_batch + row * p.out_stride_row + head * p.out_stride_head;
                std::memset(static_cast<char*>(p.out) + at * element_size, kNaNByte, p.headdim_v * element_size);
            }
        }
}

}  // namespace fastattention
