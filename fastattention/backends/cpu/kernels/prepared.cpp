#include "prepared.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>

#include "background.hpp"
#include "forward.hpp"
#include "sequences.hpp"

namespace fastattention {
namespace {

// Fetched in pieces that take a thread some microseconds: how long a call that is to run waits at most.
constexpr int64_t kPieceBytes = int64_t{64} << 10;
// Keys of a head that decode reads together (forward.cpp): fetched in the order in which they will be read.
constexpr int64_t kKeysTogether = 4096;
// All bits of a NaN may be set in every type of results.
constexpr int kNaNByte = 0xff;

std::mutex one_at_a_time;  // held by the call that runs

std::mutex order;  // guards what follows
std::deque<Prepared*> expected;
int running = 0;

// The second half of the last-level cache is left to what else the processor does.
int64_t worth_fetching() {
    const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
    return bytes > 0 ? bytes / 2 : 0;
}

// Appends rows begin ... end - 1 where they lie side by side.
void append_rows(const Rows& rows, int64_t row_bytes, int64_t begin, int64_t end, std::vector<MemoryRange>& to) {
    if (rows.stride_row != row_bytes) return;
    for (int64_t row = begin; row < end;) {
        const int64_t position = rows.first + row;
        int64_t count = std::min(std::max<int64_t>(kPieceBytes / row_bytes, 1), end - row);
        if (rows.pages != nullptr) count = std::min(count, rows.page_size - position % rows.page_size);
        to.push_back({rows(row), count * row_bytes});
        row += count;
    }
}

// What a decode reads first, up to `most` bytes.
std::vector<MemoryRange> read_first(const FaAttentionParams& p, int64_t most) {
    std::vector<MemoryRange> ranges;
    const Call call = make_call(p);
    const int64_t key_bytes = p.headdim * call.cache_element_size, value_bytes = p.headdim_v * call.cache_element_size;
    for (int64_t batch = 0; batch < p.batch_size; ++batch) {
        const Sequence s = make_sequence(call, batch);
        const KeyRange keys = visible_keys(s.mask);
        for (int64_t begin = keys.begin; begin < keys.end; begin += kKeysTogether) {
            const int64_t end = std::min(begin + kKeysTogether, keys.end);
            for (int64_t head = 0; head < p.nheads_k; ++head) {
                most -= (end - begin) * (key_bytes + value_bytes);
                if (most < 0) return ranges;
                append_rows(call.keys(s, head), key_bytes, begin, end, ranges);
                append_rows(call.values(s, head), value_bytes, begin, end, ranges);
            }
        }
    }
    return ranges;
}

}  // namespace

Prepared::~Prepared() {
    std::lock_guard<std::mutex> lock(order);
    const auto found = std::find(expected.begin(), expected.end(), this);
    if (found == expected.end()) return;
    expected.erase(found);
    stop_background();  // it may be what is being fetched
}

void Prepared::expect() {
    first_read_ = read_first(params_, worth_fetching());
    std::lock_guard<std::mutex> lock(order);
    expected.push_back(this);
    if (running == 0 && expected.size() == 1) fetch();
}

void Prepared::run() {
    {
        std::lock_guard<std::mutex> lock(order);
        const auto found = std::find(expected.begin(), expected.end(), this);
        if (found != expected.end()) expected.erase(found);
        ++running;
        stop_background();
    }
    {
        std::lock_guard<std::mutex> lock(one_at_a_time);
        failed_ = !forward(kernels_, params_);
        if (failed_) spoil();
    }
    std::lock_guard<std::mutex> lock(order);
    if (--running == 0 && !expected.empty()) expected.front()->fetch();
}

void Prepared::fetch() {
    auto read = [](void* context, int64_t index, int) {
        const auto& call = *static_cast<const Prepared*>(context);
        const MemoryRange& range = call.first_read_[index];
        call.kernels_.read_loop(range.data, range.bytes);
    };
    if (!first_read_.empty())
        start_background(static_cast<int64_t>(first_read_.size()), static_cast<int>(params_.num_threads), read, this);
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
