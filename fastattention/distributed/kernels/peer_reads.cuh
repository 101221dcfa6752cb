// Reads packets of several GPUs: one range of each rank, all at the same time. CTAs take turns with chunks of packets, the
// same chunks of every range. A thread gets the same packets of all ranges.
#pragma once

#include "packet.cuh"

namespace fastattention {

constexpr int kRanks = Config::num_ranks;
constexpr int kAllReduceWarps = Config::num_warps;  // per CTA
constexpr int kAllReduceThreads = 32 * kAllReduceWarps;

// The range of rank r starts at packet begin + r * step and has `longest` packets, or ends at `end`; rank `without` has none.
template <class Format>
struct PeerRanges {
    using Item = typename Format::Item;
    void* const* memory;  // packet 0 of each rank
    int64_t begin, step, longest, end;
    int without;

    FA_DEVICE int64_t packets(int rank) const {
        const int64_t left = end - begin - rank * step;
        return rank == without ? 0 : left < longest ? left : longest;
    }
    FA_DEVICE int64_t number(int rank, int64_t at) const { return (begin + rank * step + at) * Packet<Format>::kNumbers; }
    FA_DEVICE const Item* item(int rank, int64_t at) const {
        return static_cast<const Item*>(memory[rank]) + number(rank, at);
    }
};

// Reads into registers. A multiprocessor gets about 10 GB/s from other GPUs this way, however many loads are in flight.
template <class Format>
class RegisterReads {
    using SomePacket = Packet<Format>;
    using Ranges = PeerRanges<Format>;
    static constexpr int kAtOnce = 8 / kRanks > 1 ? 8 / kRanks : 1;

public:
    FA_DEVICE RegisterReads(int cta, int num_ctas)
        : first_(static_cast<int64_t>(cta) * kAllReduceThreads + thread_index()),
          stride_(static_cast<int64_t>(num_ctas) * kAllReduceThreads) {}

    // Calls use(at, packets) for each of this thread's packets. Packets after the end of a range are not set.
    template <class Use>
    FA_DEVICE void for_each(const Ranges& ranges, const Use& use) {
        for (int64_t at = first_; at < ranges.longest; at += kAtOnce * stride_) {
            SomePacket packets[kAtOnce][kRanks];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
                for (int rank = 0; rank < kRanks; ++rank)
                    if (at + i * stride_ < ranges.packets(rank))
                        packets[i][rank] = SomePacket::read(ranges.item(rank, at + i * stride_));
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                if (at + i * stride_ < ranges.longest) use(at + i * stride_, packets[i]);
        }
    }

private:
    const int64_t first_, stride_;
};

// Reads into shared memory by bulk copies, which is three times as fast.
template <class Format>
class BulkReads {
    using SomePacket = Packet<Format>;
    using Ranges = PeerRanges<Format>;
    static constexpr int kAtOnce = kRanks <= 4 ? 2 : 1;  // packets per thread between two barriers
    static constexpr int kStagePackets = kAtOnce * kAllReduceThreads;  // packets of a rank that are copied together
    static constexpr int kStageBytes = 16 * kStagePackets;
    static constexpr int kStages = 24 / (kAtOnce * kRanks);
    static constexpr int kCounters = kStages * kRanks * kStageBytes;  // offset of the counters
    static_assert(!Config::bulk_copies || Config::shared_bytes == kCounters + kStages * 8, "Python counts otherwise");

public:
    FA_DEVICE BulkReads(int cta, int num_ctas)
        : first_(static_cast<int64_t>(cta) * kStagePackets), stride_(static_cast<int64_t>(num_ctas) * kStagePackets) {
        if (thread_index() == 0)
            for (int stage = 0; stage < kStages; ++stage) bulk_begin(counter(stage));
        cta_barrier();
    }

    // Does what RegisterReads::for_each does.
    template <class Use>
    FA_DEVICE void for_each(const Ranges& ranges, const Use& use) {
        bulk_fence();
        if (thread_index() == 0)
            for (int ahead = 0; ahead < kStages - 1; ++ahead) request(first_ + ahead * stride_, ahead, ranges);
        for (int64_t chunk = first_; chunk < ranges.longest; chunk += stride_, ++taken_) {
            // Copies into the stage that all threads finished reading before the last barrier.
            if (thread_index() == 0) request(chunk + (kStages - 1) * stride_, kStages - 1, ranges);
            const uint32_t stage = taken_ % kStages;
            bulk_wait(counter(stage), taken_ / kStages & 1);
            SomePacket packets[kAtOnce][kRanks];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
                for (int rank = 0; rank < kRanks; ++rank) {
                    const int within = i * kAllReduceThreads + thread_index();
                    if (chunk + within < ranges.packets(rank))
                        packets[i][rank] = SomePacket::read_shared(place(stage, rank) + 16 * within);
                }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int64_t at = chunk + i * kAllReduceThreads + thread_index();
                if (at < ranges.longest) use(at, packets[i]);
            }
            cta_barrier();
        }
    }

private:
    // Copies a chunk of every range, starting at packet `at`, into the stage `ahead` chunks ahead. One thread calls this.
    FA_DEVICE void request(int64_t at, int ahead, const Ranges& ranges) {
        if (at >= ranges.longest) return;
        const uint32_t stage = (taken_ + ahead) % kStages;
        uint32_t bytes[kRanks], all = 0;
#pragma unroll
        for (int rank = 0; rank < kRanks; ++rank) {
            const int64_t left = ranges.packets(rank) - at;
            bytes[rank] = left <= 0 ? 0 : left < kStagePackets ? 16 * static_cast<uint32_t>(left) : kStageBytes;
            all += bytes[rank];
        }
        bulk_expect(counter(stage), all);
#pragma unroll
        for (int rank = 0; rank < kRanks; ++rank)
            if (bytes[rank] != 0) bulk_copy(place(stage, rank), ranges.item(rank, at), bytes[rank], counter(stage));
    }

    static FA_DEVICE uint32_t place(uint32_t stage, int rank) {
        return shared_memory() + (stage * kRanks + rank) * kStageBytes;
    }
    static FA_DEVICE uint32_t counter(uint32_t stage) { return shared_memory() + kCounters + stage * 8; }

    const int64_t first_, stride_;  // this CTA's first packet, and the distance of its chunks
    uint32_t taken_ = 0;  // chunks read since the kernel began
};

template <class Format, bool kBulkCopies>
struct PeerReadsOf {
    using Type = RegisterReads<Format>;
};
template <class Format>
struct PeerReadsOf<Format, true> {
    using Type = BulkReads<Format>;
};

}  // namespace fastattention
