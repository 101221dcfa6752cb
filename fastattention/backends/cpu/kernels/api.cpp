// The exported functions. Arguments were validated in Python; here they are trusted.
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>

#include "driver.hpp"
#include "isa.hpp"
#include "omp_team.hpp"
#include "prepared.hpp"
#include "thread_pool.hpp"
#include "work_queue.hpp"

#define FA_EXPORT extern "C" __attribute__((visibility("default")))

using namespace fastattention;

namespace {

// One of many calls that differ in their addresses only: `addresses` are the fields of `plan` before dtype. Calls of
// several threads may share a plan.
FaAttentionParams with_addresses(const FaAttentionParams& plan, const void* addresses, int64_t num_threads) {
    FaAttentionParams params = plan;
    std::memcpy(&params, addresses, offsetof(FaAttentionParams, dtype));
    params.num_threads = num_threads;
    return params;
}

}  // namespace

// Changes with every change of params.h, of what its fields may be or of a function below, so that a stale library is found out when it is loaded.
FA_EXPORT int64_t fastattention_abi_version() { return 11; }
FA_EXPORT int64_t fastattention_params_size() { return sizeof(FaAttentionParams); }

FA_EXPORT int64_t fastattention_num_isas() { return num_isas(); }
FA_EXPORT const char* fastattention_isa_name(int64_t isa) { return isa_kernels(static_cast<int>(isa)).name; }

// Whether it serves qk_dtype FA_INT8.
FA_EXPORT int64_t fastattention_multiplies_int8(int64_t isa) {
    return has_int8_dot(isa_kernels(static_cast<int>(isa))) ? 1 : 0;
}

// 0, or 1 when memory ran out.
FA_EXPORT int64_t fastattention_forward(int64_t isa, const FaAttentionParams* plan, const void* addresses,
                                        int64_t num_threads) {
    const FaAttentionParams params = with_addresses(*plan, addresses, num_threads);
    return forward(isa_kernels(static_cast<int>(isa)), params) ? 0 : 1;
}

// The gradients of a call without a cache: `plan` and `addresses` are those of its forward.
FA_EXPORT int64_t fastattention_backward(int64_t isa, const FaAttentionParams* plan, const void* addresses,
                                         const FaGradients* gradients, int64_t num_threads) {
    const FaAttentionParams params = with_addresses(*plan, addresses, num_threads);
    return backward(isa_kernels(static_cast<int>(isa)), params, *gradients) ? 0 : 1;
}

// Linear attention; 0, or 1 when memory ran out. `addresses` are the fields of `plan` before dtype.
FA_EXPORT int64_t fastattention_linear(int64_t isa, const FaLinearParams* plan, const void* addresses, int64_t num_threads) {
    FaLinearParams params = *plan;
    std::memcpy(&params, addresses, offsetof(FaLinearParams, dtype));
    params.num_threads = num_threads;
    return linear(isa_kernels(static_cast<int>(isa)), params) ? 0 : 1;
}

// A call of a dense cache with lse, to be run later; null when memory ran out. fastattention_release gives it up.
FA_EXPORT void* fastattention_prepare(int64_t isa, const FaAttentionParams* params) {
    return new (std::nothrow) Prepared(isa_kernels(static_cast<int>(isa)), *params);
}

// From any thread.
FA_EXPORT void fastattention_run(void* prepared) { static_cast<Prepared*>(prepared)->run(); }

// Whether memory ran out when it was run: its results are NaN then.
FA_EXPORT int64_t fastattention_failed(const void* prepared) {
    return static_cast<const Prepared*>(prepared)->failed() ? 1 : 0;
}

FA_EXPORT void fastattention_release(void* prepared) { delete static_cast<Prepared*>(prepared); }

// A WorkQueue; null when it cannot be had.
FA_EXPORT void* fastattention_queue_start(const uint32_t* ready, uint32_t* done) {
    try {
        return new WorkQueue(ready, done);
    } catch (const std::exception&) {  // of memory, or of threads
        return nullptr;
    }
}

// 0, or 1 when memory ran out.
FA_EXPORT int64_t fastattention_queue_push(void* queue, uint32_t number, WorkQueue::Function function, void* argument) {
    try {
        static_cast<WorkQueue*>(queue)->push(number, function, argument);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

FA_EXPORT uint32_t fastattention_queue_newest(void* queue) { return static_cast<WorkQueue*>(queue)->newest(); }

// Waits for the job under way.
FA_EXPORT void fastattention_queue_end(void* queue) { delete static_cast<WorkQueue*>(queue); }

// Addresses of GOMP_parallel and omp_get_max_threads; null for none.
FA_EXPORT void fastattention_set_omp_team(void* parallel, void* max_threads) {
    set_omp_team({reinterpret_cast<decltype(OpenMp::parallel)>(parallel),
                  reinterpret_cast<decltype(OpenMp::max_threads)>(max_threads)});
}

// Sum of the floating-point operations that all threads did. kind: 0 float32 multiply-add, 1 bfloat16 dot; 0 when the
// instruction set has none.
FA_EXPORT double fastattention_flop_loop(int64_t isa, int64_t kind, int64_t iterations, int64_t num_threads) {
    const Kernels& kernels = isa_kernels(static_cast<int>(isa));
    const auto loop = kind == 0 ? kernels.fma_loop : kernels.bf16_dot_loop;
    if (loop == nullptr) return 0.0;
    double per_thread = 0.0;
    parallel_for(num_threads, static_cast<int>(num_threads), [&](int64_t index, int) {
        const double operations = loop(iterations);
        if (index == 0) per_thread = operations;
    });
    return per_thread * static_cast<double>(num_threads);
}

FA_EXPORT void fastattention_read_loop(int64_t isa, const char* data, int64_t bytes, int64_t num_threads) {
    constexpr int64_t kReadChunk = int64_t{1} << 20;
    const Kernels& kernels = isa_kernels(static_cast<int>(isa));
    parallel_for(bytes / kReadChunk, static_cast<int>(num_threads),
                 [&](int64_t index, int) { kernels.read_loop(data + index * kReadChunk, kReadChunk); });
}

// What tile_range.hpp says of a tile, for the test that holds tile_range.py to it.
FA_EXPORT int64_t fastattention_classify_tile(int64_t seqlen_q, int64_t seqlen_k, int64_t left, int64_t right,
                                              int64_t first_q, int64_t last_q, int64_t first_k, int64_t last_k) {
    return static_cast<int64_t>(TileRange{seqlen_q, seqlen_k, left, right}.classify(first_q, last_q, first_k, last_k));
}
