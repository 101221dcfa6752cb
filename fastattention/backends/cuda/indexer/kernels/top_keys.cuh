// The keys of the greatest scores of each query, in rising order. A CTA has a query.
//
// The CTA counts ranks of scores by their first bits, then those with the same first bits by the next ones, and so finds the
// rank of the topk-th score. One more pass writes the keys.
#pragma once

#include "indexer_sequence.cuh"
#include "lanes.cuh"

namespace fastattention {

constexpr int kThreads = Config::num_warps * 32;
constexpr int kPassBits = 11, kBins = 1 << kPassBits, kBinsOfThread = kBins / kThreads, kCopies = Config::bin_copies;
static_assert(kBinsOfThread * kThreads == kBins);

class TopKeys {
public:
    FA_DEVICE TopKeys(const IndexerParams& p, int row)
        : p_(p),
          scores_(p.scores + (row - p.first_row) * p.scores_stride),
          indices_(p.indices + static_cast<int64_t>(row) * p.topk),
          seen_(IndexerSequence(p, sequence_of_row(p, row)).seen_by(row)),
          at_(shared_memory()) {}

    FA_DEVICE void run() {
        if (seen_ <= p_.topk) {
            for (int i = thread_index(); i < p_.topk; i += kThreads) indices_[i] = i < seen_ ? i : -1;
            return;
        }
        find_digit(21, kPassBits);
        find_digit(10, kPassBits);
        find_digit(0, 10);
        write_keys();
    }

private:
    static constexpr int kTogether = 4;  // neighbouring ranks that a thread reads
    static constexpr int kLoads = 4;     // such reads that are on their way together
    static constexpr int kStep = kThreads * kTogether;
    static constexpr int kSumsAt = kCopies * kBins * 4, kFoundAt = kSumsAt + Config::num_warps * 4;
    static_assert(kFoundAt + 8 == Config::shared_bytes);

    // Scores of neighbouring keys from `first` on.
    FA_DEVICE Words4 read(int first) const { return load_written_128(scores_ + first, first < seen_); }

    // Integers whose order is that of scores. Those behind the last key are 0, which no score has. NaN, which comes without a
    // sign, is the greatest; no score is -0.
    FA_DEVICE void rank(Words4& scores, int first) const {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            const uint32_t bits = scores.word[i];
            const uint32_t flipped = static_cast<uint32_t>(static_cast<int>(bits) >> 31) | 0x80000000u;
            scores.word[i] = first + i < seen_ ? bits ^ flipped : 0;
        }
    }

    // Finds the next `bits` bits of the rank of the last key that is taken, of which those above are known.
    FA_DEVICE void find_digit(int shift, int bits) {
        const uint32_t digits = (1u << bits) - 1, known = shift + bits == 32 ? 0 : 0xffffffffu << (shift + bits);
        for (int i = thread_index(); i < kCopies * kBins; i += kThreads) store_shared_32(at_ + i * 4, 0);
        cta_barrier();
        const uint32_t at = at_ + lane_index() % kCopies * 4;
        for (int first = thread_index() * kTogether; first < seen_; first += kLoads * kStep) {
            Words4 ranks[kLoads];
#pragma unroll
            for (int load = 0; load < kLoads; ++load) ranks[load] = read(first + load * kStep);
#pragma unroll
            for (int load = 0; load < kLoads; ++load) {
                rank(ranks[load], first + load * kStep);
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    const uint32_t rank = ranks[load].word[i];
                    if (rank != 0 && (rank & known) == rank_) add_shared_32(at + (rank >> shift & digits) * (kCopies * 4), 1);
                }
            }
        }
        cta_barrier();
        // Bins of threads go from the highest to the lowest. Eight lanes begin with different ones modulo 8, to read all banks.
        int bin = kBins - 1 - thread_index() * kBinsOfThread, sum = 0;
#pragma unroll
        for (int i = 0; i < kBinsOfThread; ++i)
            sum += count_of(bin - (thread_index() * kBinsOfThread / 8 + i) % kBinsOfThread);
        int above = sum_before(sum);
        if (above < ties_ && ties_ <= above + sum) {
            for (int count = count_of(bin); above + count < ties_; count = count_of(--bin)) above += count;
            store_shared_32(at_ + kFoundAt, static_cast<uint32_t>(bin));
            store_shared_32(at_ + kFoundAt + 4, static_cast<uint32_t>(ties_ - above));
        }
        cta_barrier();
        rank_ |= load_shared_32(at_ + kFoundAt) << shift;
        ties_ = static_cast<int>(load_shared_32(at_ + kFoundAt + 4));
        cta_barrier();
    }

    // How many ranks are in a bin.
    FA_DEVICE int count_of(int bin) const {
        static_assert(kCopies == 4, "a load has all copies");
        const Words4 copies = load_shared_128(at_ + bin * (kCopies * 4));
        return static_cast<int>(copies.word[0] + copies.word[1] + copies.word[2] + copies.word[3]);
    }

    // The sum over all threads before this one. All threads call it, and have passed a barrier since the last time.
    FA_DEVICE int sum_before(int x) const {
        const int warp = thread_index() / 32, up_to = sum_up_to_lane(x);
        if (lane_index() == 31) store_shared_32(at_ + kSumsAt + warp * 4, static_cast<uint32_t>(up_to));
        cta_barrier();
        // Each lane has the sum of a warp.
        const int of_warp = lane_index() < warp ? static_cast<int>(load_shared_32(at_ + kSumsAt + lane_index() * 4)) : 0;
        return sum_of_lanes(of_warp) + up_to - x;
    }

    FA_DEVICE void write_keys() const {
        int higher = 0, equal = 0;  // keys so far with ranks above that of the last key, and with that rank
        Words4 ahead = read(thread_index() * kTogether);
        for (int begin = 0; begin < seen_; begin += kStep) {
            const int first = begin + thread_index() * kTogether;
            Words4 ranks = ahead;
            rank(ranks, first);
            ahead = read(first + kStep);
            int mine = 0;  // counts of both in the upper and the lower half
#pragma unroll
            for (int i = 0; i < kTogether; ++i) mine += (ranks.word[i] > rank_) * 0x10000 + (ranks.word[i] == rank_);
            const int before = sum_before(mine);
            int higher_before = higher + (before >> 16), equal_before = equal + (before & 0xffff);
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const bool is_higher = ranks.word[i] > rank_, is_equal = ranks.word[i] == rank_;
                const int taken = equal_before < ties_ ? equal_before : ties_;
                if (is_higher || (is_equal && equal_before < ties_)) indices_[higher_before + taken] = first + i;
                higher_before += is_higher;
                equal_before += is_equal;
            }
            // The last thread has counted all keys so far.
            if (thread_index() == kThreads - 1) {
                store_shared_32(at_ + kFoundAt, static_cast<uint32_t>(higher_before));
                store_shared_32(at_ + kFoundAt + 4, static_cast<uint32_t>(equal_before));
            }
            cta_barrier();
            higher = static_cast<int>(load_shared_32(at_ + kFoundAt));
            equal = static_cast<int>(load_shared_32(at_ + kFoundAt + 4));
            if (higher + (equal < ties_ ? equal : ties_) == p_.topk) return;
        }
    }

    const IndexerParams& p_;
    const float* const scores_;
    int32_t* const indices_;
    const int seen_;
    const uint32_t at_;
    uint32_t rank_ = 0;   // the bits that are known of the rank of the last key
    int ties_ = p_.topk;  // keys that are taken among those with this rank
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kThreads, 1)
    fastattention_top_keys(FA_PARAMETER fastattention::IndexerParams params) {
    using namespace fastattention;
    TopKeys(params, params.first_row + static_cast<int>(cta_index())).run();
}
