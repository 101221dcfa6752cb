// All-reduce over the GPUs of a host, in memory that all of them read.
//
// The elements are cut into one share per rank. Every rank sums its own share over all ranks' parts, in their order, and
// overwrites that share of its part with the sums. After a barrier it reads the other shares from the ranks that summed them
// (two-shot). CTA i of a rank waits only for CTAs i of the others: they process the same packets of every share. For few
// elements, every rank sums all of them instead (one-shot).
#pragma once

#include "all_reduce_params.h"
#include "peer_reads.cuh"

namespace fastattention {

class AllReduce {
    using Format = FormatOf<Config::float32>::Type;
    using Item = Format::Item;
    using SomePacket = Packet<Format>;
    using Ranges = PeerRanges<Format>;
    static constexpr int kNumbers = SomePacket::kNumbers;

public:
    FA_DEVICE AllReduce(const AllReduceParams& p, int cta) : p_(p), cta_(cta), step_(p.steps[cta]), reads_(cta, p.num_ctas) {}

    FA_DEVICE void run() {
        barrier();
        if (p_.one_shot) {
            add_up(all_packets());
        } else {
            add_up(own_share());
            barrier();
            collect(other_shares());
        }
        barrier();  // No rank reads this rank's part any more.
        if (thread_index() == 0) p_.steps[cta_] = step_;
    }

private:
    // A barrier of all ranks' CTAs of this index, which then see what the others have written.
    FA_DEVICE void barrier() {
        step_ = static_cast<int32_t>(static_cast<uint32_t>(step_) + 1u);  // Steps may wrap around.
        cta_barrier();
        const int other = thread_index();
        if (other < kRanks && other != p_.rank) {
            bulk_fence();
            system_fence();
            store_flag(p_.arrivals[other] + cta_ * kMostRanks + p_.rank, step_);
            wait_until(p_.arrivals[p_.rank] + cta_ * kMostRanks + other, step_);
        }
        cta_barrier();
    }

    // Waits until a flag is `step` or later.
    FA_DEVICE void wait_until(const int32_t* flag, int32_t step) const {
        const int64_t deadline = nanoseconds() + p_.timeout;
        while (static_cast<int32_t>(static_cast<uint32_t>(load_flag(flag)) - static_cast<uint32_t>(step)) < 0)
            if (nanoseconds() > deadline) give_up();
        system_fence();
    }

    // All packets of every rank.
    FA_DEVICE Ranges all_packets() const {
        const int64_t packets = (p_.count + kNumbers - 1) / kNumbers;
        return {p_.parts, 0, 0, packets, packets, kRanks};
    }

    // From every other rank, the share that it sums.
    FA_DEVICE Ranges other_shares() const {
        Ranges all = all_packets();
        all.step = all.longest = (all.longest + kRanks - 1) / kRanks;
        all.without = p_.rank;
        return all;
    }

    // From every rank, the share that this rank sums.
    FA_DEVICE Ranges own_share() const {
        Ranges share = other_shares();
        share.begin += p_.rank * share.step;
        share.step = 0;
        share.without = kRanks;
        return share;
    }

    FA_DEVICE void add_up(const Ranges& parts) {
        reads_.for_each(parts, [&](int64_t at, const SomePacket(&read)[kRanks]) {
            if (at >= parts.packets(0)) return;
            float sum[kNumbers] = {};
#pragma unroll
            for (int rank = 0; rank < kRanks; ++rank) read[rank].add_to(sum);
            const SomePacket packet = SomePacket::narrowed(sum);
            write(packet, p_.out, parts.number(0, at));
            if (!p_.one_shot) write(packet, p_.parts[p_.rank], parts.number(0, at));
        });
    }

    // Reads all shares at once, which keeps every link busy.
    FA_DEVICE void collect(const Ranges& sums) {
        reads_.for_each(sums, [&](int64_t at, const SomePacket(&read)[kRanks]) {
#pragma unroll
            for (int rank = 0; rank < kRanks; ++rank)
                if (at < sums.packets(rank)) write(read[rank], p_.out, sums.number(rank, at));
        });
    }

    // Writes a packet. The last one may extend past the last element.
    FA_DEVICE void write(const SomePacket& packet, void* numbers, int64_t first) const {
        packet.write(static_cast<Item*>(numbers) + first, p_.count - first);
    }

    const AllReduceParams& p_;
    const int cta_;
    int32_t step_;
    typename PeerReadsOf<Format, Config::bulk_copies>::Type reads_;
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kAllReduceThreads, 1)
    fastattention_all_reduce(FA_PARAMETER fastattention::AllReduceParams params) {
    using namespace fastattention;
    AllReduce(params, static_cast<int>(cta_index())).run();
}
