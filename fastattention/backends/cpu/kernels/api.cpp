// The exported functions. Arguments were validated in Python; here they are trusted.
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <string_view>

#include "attention/driver.hpp"
#include "attention/prepared.hpp"
#include "common/isa.hpp"
#include "common/omp_team.hpp"
#include "common/thread_pool.hpp"
#include "common/work_queue.hpp"
#include "convolution/driver.hpp"
#include "indexer/driver.hpp"
#include "kernels.hpp"
#include "linear/driver.hpp"
#include "selection/driver.hpp"

#define FA_EXPORT extern "C" __attribute__((visibility("default")))

using namespace fastattention;

namespace {

const Kernels& kernels_of(int64_t isa) { return isa_kernels(static_cast<int>(isa)); }

// The arguments of one call. Calls with tensors of the same shapes and strides share a struct: they differ only in
// `addresses`, the fields of the struct before dtype. Several threads may read it at a time.
template <class Params>
Params with_addresses(const Params& shared, const void* addresses, int64_t num_threads) {
    Params params = shared;
    std::memcpy(&params, addresses, offsetof(Params, dtype));
    params.num_threads = num_threads;
    return params;
}

}  // namespace

// Loading a library of another version fails. Increase it when a params.h, the values that a field may take, or a function
// below changes.
FA_EXPORT int64_t fastattention_abi_version() { return 15; }

// Size of a struct of params.h in bytes, which loading compares with the header that Python reads; 0 for an unknown name.
FA_EXPORT int64_t fastattention_sizeof(const char* name) {
    const std::string_view wanted = name;
    if (wanted == "FaAttentionParams") return sizeof(FaAttentionParams);
    if (wanted == "FaGradients") return sizeof(FaGradients);
    if (wanted == "FaLinearParams") return sizeof(FaLinearParams);
    if (wanted == "FaLinearGradients") return sizeof(FaLinearGradients);
    if (wanted == "FaConvolutionParams") return sizeof(FaConvolutionParams);
    if (wanted == "FaConvolutionGradients") return sizeof(FaConvolutionGradients);
    if (wanted == "FaIndexerParams") return sizeof(FaIndexerParams);
    if (wanted == "FaSelectionParams") return sizeof(FaSelectionParams);
    return 0;
}

FA_EXPORT int64_t fastattention_num_isas() { return num_isas(); }
FA_EXPORT const char* fastattention_isa_name(int64_t isa) { return kernels_of(isa).name; }

// Whether an instruction set serves qk_dtype FA_INT8.
FA_EXPORT int64_t fastattention_multiplies_int8(int64_t isa) { return has_int8_dot(kernels_of(isa).int8_dot) ? 1 : 0; }

// Returns 0, or 1 if memory ran out.
FA_EXPORT int64_t fastattention_forward(int64_t isa, const FaAttentionParams* shared, const void* addresses,
                                        int64_t num_threads) {
    const FaAttentionParams params = with_addresses(*shared, addresses, num_threads);
    return forward(kernels_of(isa).attention, params) ? 0 : 1;
}

// Computes the gradients of a call without a cache, given `shared` and `addresses` of its forward. Returns as forward does.
FA_EXPORT int64_t fastattention_backward(int64_t isa, const FaAttentionParams* shared, const void* addresses,
                                         const FaGradients* gradients, int64_t num_threads) {
    const FaAttentionParams params = with_addresses(*shared, addresses, num_threads);
    return backward(kernels_of(isa).attention, params, *gradients) ? 0 : 1;
}

// Computes linear attention. Returns 0, or 1 if memory ran out.
FA_EXPORT int64_t fastattention_linear(int64_t isa, const FaLinearParams* shared, const void* addresses,
                                       int64_t num_threads) {
    const FaLinearParams params = with_addresses(*shared, addresses, num_threads);
    return linear(kernels_of(isa).linear, params) ? 0 : 1;
}

// Computes the gradients of a call, given `shared` and `addresses` of its forward. Returns as fastattention_linear does.
FA_EXPORT int64_t fastattention_linear_backward(int64_t isa, const FaLinearParams* shared, const void* addresses,
                                                const FaLinearGradients* gradients, int64_t num_threads) {
    const FaLinearParams params = with_addresses(*shared, addresses, num_threads);
    return linear_backward(kernels_of(isa).linear, params, *gradients) ? 0 : 1;
}

// Computes a causal convolution. Returns 0, or 1 if memory ran out.
FA_EXPORT int64_t fastattention_convolution(int64_t isa, const FaConvolutionParams* shared, const void* addresses,
                                            int64_t num_threads) {
    const FaConvolutionParams params = with_addresses(*shared, addresses, num_threads);
    return convolution(kernels_of(isa).convolution, params) ? 0 : 1;
}

// Computes the gradients of a causal convolution, given `shared` and `addresses` of its forward.
FA_EXPORT int64_t fastattention_convolution_backward(int64_t isa, const FaConvolutionParams* shared, const void* addresses,
                                                     const FaConvolutionGradients* gradients, int64_t num_threads) {
    const FaConvolutionParams params = with_addresses(*shared, addresses, num_threads);
    return convolution_backward(kernels_of(isa).convolution, params, *gradients) ? 0 : 1;
}

// Finds the keys of the greatest index scores. Returns 0, or 1 if memory ran out.
FA_EXPORT int64_t fastattention_indexer(int64_t isa, const FaIndexerParams* shared, const void* addresses,
                                        int64_t num_threads) {
    const FaIndexerParams params = with_addresses(*shared, addresses, num_threads);
    return index_keys(kernels_of(isa).indexer, params) ? 0 : 1;
}

// Finds the slots of the keys that indices name. Returns -1, or the place of the first index that is no block of its sequence.
FA_EXPORT int64_t fastattention_select_slots(const FaSelectionParams* shared, const void* addresses, int64_t num_threads) {
    return select_slots(with_addresses(*shared, addresses, num_threads));
}

// Prepares a call with a dense cache and lse, to be run later; null if memory ran out. fastattention_release frees it.
FA_EXPORT void* fastattention_prepare(int64_t isa, const FaAttentionParams* params) {
    return new (std::nothrow) Prepared(kernels_of(isa).attention, *params);
}

// May be called from any thread.
FA_EXPORT void fastattention_run(void* prepared) { static_cast<Prepared*>(prepared)->run(); }

// Whether memory ran out during the run. Its results are then NaN.
FA_EXPORT int64_t fastattention_failed(const void* prepared) {
    return static_cast<const Prepared*>(prepared)->failed() ? 1 : 0;
}

FA_EXPORT void fastattention_release(void* prepared) { delete static_cast<Prepared*>(prepared); }

// Starts a WorkQueue; null if memory or threads run out.
FA_EXPORT void* fastattention_queue_start(const uint32_t* ready, uint32_t* done) {
    try {
        return new WorkQueue(ready, done);
    } catch (const std::exception&) {  // no memory, or no thread
        return nullptr;
    }
}

// Returns 0, or 1 if memory ran out.
FA_EXPORT int64_t fastattention_queue_push(void* queue, uint32_t number, WorkQueue::Function function, void* argument) {
    try {
        static_cast<WorkQueue*>(queue)->push(number, function, argument);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

FA_EXPORT uint32_t fastattention_queue_newest(void* queue) { return static_cast<WorkQueue*>(queue)->newest(); }

// Waits for the running job.
FA_EXPORT void fastattention_queue_end(void* queue) { delete static_cast<WorkQueue*>(queue); }

// Sets the addresses of GOMP_parallel and omp_get_max_threads; null for none.
FA_EXPORT void fastattention_set_omp_team(void* parallel, void* max_threads) {
    set_omp_team({reinterpret_cast<decltype(OpenMp::parallel)>(parallel),
                  reinterpret_cast<decltype(OpenMp::max_threads)>(max_threads)});
}

// Runs a loop of floating-point operations on every thread and returns their number, or 0 if the instruction set has none.
// kind: 0 float32 multiply-add, 1 bfloat16 dot.
FA_EXPORT double fastattention_flop_loop(int64_t isa, int64_t kind, int64_t iterations, int64_t num_threads) {
    const Kernels& kernels = kernels_of(isa);
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
    const Kernels& kernels = kernels_of(isa);
    parallel_for(bytes / kReadChunk, static_cast<int>(num_threads),
                 [&](int64_t index, int) { kernels.read_loop(data + index * kReadChunk, kReadChunk); });
}

// Classifies a tile by tile_range.hpp, for the test that compares tile_range.py with it.
FA_EXPORT int64_t fastattention_classify_tile(int64_t seqlen_q, int64_t seqlen_k, int64_t left, int64_t right,
                                              int64_t first_q, int64_t last_q, int64_t first_k, int64_t last_k) {
    return static_cast<int64_t>(TileRange{seqlen_q, seqlen_k, left, right}.classify(first_q, last_q, first_k, last_k));
}
