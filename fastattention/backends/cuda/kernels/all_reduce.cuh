// Sums the rows of a call over the GPUs of a host, in memory that all of them read: one launch of few CTAs for all blocks.
//
// A block is cut into as many shares as there are ranks. As soon as all ranks have computed it, every rank adds up its own
// share of all ranks' parts, in their order, and writes the sums in the place of its own part; when all have, it reads the
// other shares from those that added them up. CTA i of a rank meets none but CTAs i of the others, and these have the same
// packets of every share, so that no rank waits for all of another. Where there is little to sum, every rank adds up
// everything instead: one meeting less.
//
// The kernel may be running before a block is computed. All that it waits for must have been enqueued before it.
#pragma once

#include "params.h"
#include "peer_reads.cuh"

namespace fastattention {

class AllReduce {
    using Format = FormatOf<FA_FLOAT32_PARTS>::Type;
    using Item = Format::Item;
    using SomePacket = Packet<Format>;
    using Ranges = PeerRanges<Format>;
    static constexpr int kNumbers = SomePacket::kNumbers;

public:
    FA_DEVICE AllReduce(const AllReduceParams& p, int cta) : p_(p), cta_(cta), step_(p.steps[cta]), reads_(cta, p.num_ctas) {}

    FA_DEVICE void run() {
        int64_t begin = 0;
        for (int block = 0; block < p_.num_blocks; ++block) {
            const int64_t end = p_.ends[block];
            if (p_.ready != nullptr && thread_index() == 0) wait_until(p_.ready + block, 1);
            meet();
            if (p_.whole) {
                add_up(all_of(begin, end), begin, end);
            } else {
                add_up(share_of(begin, end), begin, end);
                meet();
                collect(shares_of(begin, end), begin, end);
            }
            begin = end;
        }
        meet();  // Nobody reads any more what this rank has written.
        if (thread_index() == 0) p_.steps[cta_] = step_;
    }

private:
    // All ranks' CTAs of this number come here before any goes on, and see what the others have written.
    FA_DEVICE void meet() {
        step_ = static_cast<int32_t>(static_cast<uint32_t>(step_) + 1u);  // They may wrap around.
        cta_barrier();
        const int other = thread_index();
        if (other < kRanks && other != p_.rank) {
            bulk_fence();
            system_fence();
            store_flag(p_.arrivals[other] + cta_ * kMostParts + p_.rank, step_);
            wait_until(p_.arrivals[p_.rank] + cta_ * kMostParts + other, step_);
        }
        cta_barrier();
    }

    // Until a flag is `step` or later.
    FA_DEVICE void wait_until(const int32_t* flag, int32_t step) const {
        const int64_t deadline = nanoseconds() + p_.patience;
        while (static_cast<int32_t>(static_cast<uint32_t>(load_flag(flag)) - static_cast<uint32_t>(step)) < 0)
            if (nanoseconds() > deadline) give_up();
        system_fence();
    }

    // The packets of numbers [begin, end), which have others at either end: of every rank.
    FA_DEVICE Ranges all_of(int64_t begin, int64_t end) const {
        const int64_t first = begin / kNumbers, last = (end + kNumbers - 1) / kNumbers;
        return {p_.parts, first, 0, last - first, last, kRanks};
    }

    // Of every other rank its share of them.
    FA_DEVICE Ranges shares_of(int64_t begin, int64_t end) const {
        Ranges all = all_of(begin, end);
        all.step = all.longest = (all.longest + kRanks - 1) / kRanks;
        all.without = p_.rank;
        return all;
    }

    // Of every rank this one's share.
    FA_DEVICE Ranges share_of(int64_t begin, int64_t end) const {
        Ranges share = shares_of(begin, end);
        share.begin += p_.rank * share.step;
        share.step = 0;
        share.without = kRanks;
        return share;
    }

    // Numbers [begin, end), of packets which have others at either end.
    FA_DEVICE void add_up(const Ranges& parts, int64_t begin, int64_t end) {
        reads_.for_each(parts, [&](int64_t at, const SomePacket(&read)[kRanks]) {
            if (at >= parts.packets(0)) return;
            float sum[kNumbers] = {};
#pragma unroll
            for (int rank = 0; rank < kRanks; ++rank) read[rank].add_to(sum);
            const SomePacket packet = SomePacket::narrowed(sum);
            const int64_t number = parts.number(0, at);
            packet.write(static_cast<Item*>(p_.out) + number, begin - number, end - number);
            if (!p_.whole) packet.write(static_cast<Item*>(p_.parts[p_.rank]) + number, begin - number, end - number);
        });
    }

    // All shares at once: every link has something to do.
    FA_DEVICE void collect(const Ranges& sums, int64_t begin, int64_t end) {
        reads_.for_each(sums, [&](int64_t at, const SomePacket(&read)[kRanks]) {
#pragma unroll
            for (int rank = 0; rank < kRanks; ++rank) {
                if (at >= sums.packets(rank)) continue;
                const int64_t number = sums.number(rank, at);
                read[rank].write(static_cast<Item*>(p_.out) + number, begin - number, end - number);
            }
        });
    }

    const AllReduceParams& p_;
    const int cta_;
    int32_t step_;
    PeerReads<Format> reads_;
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kAllReduceThreads, 1)
    fastattention_all_reduce(FA_PARAMETER fastattention::AllReduceParams params) {
    using namespace fastattention;
    AllReduce(params, static_cast<int>(cta_index())).run();
    if (params.ready == nullptr || thread_index() != 0 || !count_up(params.finished, params.num_ctas)) return;
    for (int block = 0; block < params.num_blocks; ++block) params.ready[block] = 0;  // for the next call
}
