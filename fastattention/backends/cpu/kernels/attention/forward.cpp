// Runs a forward: finds which keys each sequence sees and which kernels serve it, and divides the work among threads.
#include "attention/driver.hpp"

#include <algorithm>
#include <exception>
#include <vector>

#include "common/arena.hpp"
#include "common/divide_up.hpp"
#include "common/fresh_pages.hpp"
#include "attention/sequences.hpp"
#include "common/thread_pool.hpp"

namespace fastattention {
namespace {

// Up to this many query rows of a key head use keys in place (decode); more rows pay for repacking keys (prefill).
constexpr int64_t kDecodeRows = 16;
// The same limit if the values are in the keys: nothing is copied for them, and keys are split.
constexpr int64_t kLatentRows = 256;
// Fewer rows use the kernels for separate keys and values, which process eight rows at a time.
constexpr int64_t kLeastLatentRows = 9;
// Keys of a decode split: few enough to balance threads, and enough that merging takes a few percent. They depend on the
// lengths and on which heads are read together, never on the number of threads, so that results do not depend on it.
constexpr int64_t kMinSplitKeys = 256, kMaxSplitKeys = 3072, kWantedSplits = 128, kWantedTasks = 64;
// The most rows for which splits may have kMinSplitKeys keys. With more rows there is more to merge.
constexpr int64_t kShortSplitRows = 32;
// Bytes of a token that a decode task reads at once.
constexpr int64_t kTokenBytes = 4096;
// Heads are packed into panels and processed in waves of about this many bytes: working memory does not grow with the batch.
constexpr int64_t kWaveBytes = int64_t{32} << 20;
// A head whose panels take at most kOwnBytes is packed by the thread that attends to it, if threads then finish at about the
// same time: at most kFinishTogether times the ideal time.
constexpr int64_t kOwnBytes = int64_t{1} << 20;
constexpr double kFinishTogether = 1.1;
// Multiply-adds below which waking another thread costs more than it saves: about 15 microseconds of work.
constexpr double kSerialWork = 5e5;

class Forward {
public:
    Forward(const AttentionKernels& kernels, const FaAttentionParams& p) : kernels_(kernels), p_(p) {
        call_ = make_call(p);
        sequences_.reserve(p.batch_size);
        double work = 0.0;
        for (int64_t b = 0; b < p.batch_size; ++b) {
            sequences_.push_back(make_sequence(call_, b));
            const Sequence& s = sequences_.back();
            work += static_cast<double>(p.seqlen_new) * p.nheads_k * (p.headdim + p.headdim_v);
            work += static_cast<double>(s.mask.seqlen_q) * visible_keys(s.mask).size() * p.nheads * (p.headdim + p.headdim_v);
        }
        call_.sequences = sequences_.data();
        num_threads_ = work < kSerialWork ? 1 : static_cast<int>(p.num_threads);
    }

    bool run() {
        append();
        return decode() && prefill();
    }

private:
    bool is_latent(const Sequence& s) const {
        const int64_t rows = call_.rows(s);
        return kLeastLatentRows <= rows && rows <= kLatentRows && values_in_keys(p_);
    }

    bool is_decode(const Sequence& s) const {
        if (visible_keys(s.mask).size() == 0) return true;
        // Only prefill drops weights, skips blocks and multiplies in int8.
        if (p_.dropout_p > 0.0 || s.blocks || multiplies_int8(p_)) return false;
        return is_latent(s) || call_.rows(s) <= kDecodeRows;
    }

    void append() {
        const int64_t tokens = p_.seqlen_new;
        if (tokens == 0) return;
        // Copying a token is quick, so more threads pay only for many tokens.
        const int threads = tokens * p_.batch_size < 16 ? 1 : num_threads_;
        // Tokens of a panel share cache lines, so one thread writes them.
        const int64_t step = std::max<int64_t>(p_.panel_size, 1);
        const int64_t chunks = divide_up(tokens - 1, step) + 1;  // one more if the tokens begin within a panel
        parallel_for(p_.batch_size * chunks, threads, [&](int64_t index, int) {
            const Sequence& s = sequences_[index / chunks];
            const int64_t first = s.mask.seqlen_k - tokens;
            const int64_t begin = (first / step + index % chunks) * step - first;
            for (int64_t token = std::max<int64_t>(begin, 0); token < std::min(begin + step, tokens); ++token)
                kernels_.append_token(call_, s, token);
        });
    }

    // Keys of a split, for the sequences that are decoded. together: heads of a task
    int64_t split_keys(int64_t together) const {
        int64_t keys = 0;
        for (const Sequence& s : sequences_)
            if (is_decode(s)) keys += visible_keys(s.mask).size() * p_.nheads_k;
        const int64_t wanted = std::max(kWantedSplits, kWantedTasks * together);
        return std::clamp(divide_up(divide_up(keys, wanted), 128) * 128, kMinSplitKeys, kMaxSplitKeys);
    }

    // Neighbouring heads that one task reads together: in token-major caches as many as fill kTokenBytes, so that memory is
    // read in long runs; in other caches one.
    int64_t heads_per_task() const {
        const bool tokens_first = p_.k_stride_head < p_.k_stride_row && p_.v_stride_head < p_.v_stride_row;
        if (!tokens_first) return 1;
        const int64_t row_bytes = std::min(p_.headdim, p_.headdim_v) * call_.cache_element_size;
        const int64_t room = kMaxSplitFloats / (divide_up(p_.headdim, 64) * 64 + divide_up(p_.headdim_v, 64) * 64);
        return std::clamp(kTokenBytes / row_bytes, int64_t{1}, std::min({kMaxSplitHeads, room, p_.nheads_k}));
    }

    int64_t split_keys(const Sequence& s, int64_t wanted) const {
        if (p_.num_splits > 0) return std::max<int64_t>(divide_up(visible_keys(s.mask).size(), p_.num_splits), 1);
        return is_latent(s) ? std::max(wanted, kMinSplitKeys * divide_up(call_.rows(s), kShortSplitRows)) : wanted;
    }

    // Splits of the same keys are neighbours, head by head. A task is as many of them as are read together.
    void choose_splits() {
        const int64_t most_together = heads_per_task(), wanted = split_keys(most_together);
        for (int64_t i = 0; i < p_.batch_size; ++i) {
            const Sequence& s = sequences_[i];
            if (!is_decode(s) || s.mask.seqlen_q == 0) continue;
            const KeyRange keys = visible_keys(s.mask);
            const int64_t step = split_keys(s, wanted), together = is_latent(s) ? 1 : most_together;
            const int64_t count = std::max<int64_t>(divide_up(keys.size(), step), 1);
            const int64_t first = static_cast<int64_t>(splits_.size());
            for (int64_t head = 0; head < p_.nheads_k; ++head) heads_.push_back({first + head, count});
            for (int64_t j = 0; j < count; ++j) {
                const int64_t begin = keys.begin + j * step, end = std::min(begin + step, keys.end);
                for (int64_t head = 0; head < p_.nheads_k; ++head) {
                    if (head % together == 0)
                        tasks_.push_back({static_cast<int64_t>(splits_.size()), std::min(together, p_.nheads_k - head)});
                    splits_.push_back({i, head, begin, end, nullptr, nullptr, nullptr});
                }
            }
        }
    }

    bool decode() {
        choose_splits();
        if (splits_.empty()) return true;
        const int64_t stride = kernels_.split_stride(p_);
        int64_t floats = 0;
        auto rows_of = [&](const DecodeSplit& split) {
            const Sequence& s = sequences_[split.sequence];
            return is_latent(s) ? divide_up(call_.rows(s), kLatentRowStep) * kLatentRowStep : call_.rows(s);
        };
        for (const DecodeSplit& split : splits_) floats += rows_of(split) * (stride + 2);
        // Each thread gets whole cache lines.
        const int64_t scratch = values_in_keys(p_) ? divide_up(kernels_.latent_scratch(p_), 16) * 16 : 0;
        Arena arena((scratch * num_threads_ + floats) * sizeof(float));
        if (arena.data() == nullptr) return false;
        float* working = reinterpret_cast<float*>(arena.data());
        float* at = working + scratch * num_threads_;
        for (DecodeSplit& split : splits_) {
            const int64_t rows = rows_of(split);
            split.acc_o = at;
            split.row_max = split.acc_o + rows * stride;
            split.row_sum = split.row_max + rows;
            at = split.row_sum + rows;
        }
        parallel_for(static_cast<int64_t>(tasks_.size()), num_threads_, [&](int64_t index, int slot) {
            const DecodeSplit& first = splits_[tasks_[index].first];
            if (is_latent(sequences_[first.sequence])) {
                kernels_.decode_latent(call_, first, working + slot * scratch);
            } else {
                kernels_.decode_splits(call_, &first, tasks_[index].count);
            }
        });
        // More threads pay only if there is a lot to merge.
        const int threads = floats < (int64_t{1} << 18) ? 1 : num_threads_;
        parallel_for(static_cast<int64_t>(heads_.size()), threads, [&](int64_t index, int) {
            kernels_.decode_merge(call_, &splits_[heads_[index].first], heads_[index].count, p_.nheads_k);
        });
        return true;
    }

    // A head of prefill and the panels of it that some query sees.
    struct PrefillJob {
        HeadPanels head;
        int64_t first_panel, end_panel;
        int64_t floats;  // for keys, then values, then their scales, then the mean of keys
        int64_t tiles;

        int64_t num_panels() const { return end_panel - first_panel; }
    };

    bool prefill() {
        std::vector<PrefillJob> jobs;
        const PanelGeometry g = kernels_.panel_geometry(p_);
        const int64_t scales = is_quantized(p_) ? 2 : multiplies_int8(p_) ? 1 : 0;  // per key, or per key and its value
        const int64_t mean = multiplies_int8(p_) ? divide_up(p_.headdim, 16) * 16 : 0;
        for (int64_t i = 0; i < p_.batch_size; ++i) {
            const Sequence& s = sequences_[i];
            if (is_decode(s)) continue;
            const KeyRange seen = visible_keys(s.mask);
            // Tiles begin where a group of kDropoutKeys keys begins.
            const int64_t step = p_.dropout_p > 0.0 ? std::max(g.panel, kDropoutKeys) : g.panel;
            const int64_t first = seen.begin / step * step / g.panel, end = divide_up(seen.end, g.panel);
            const int64_t keys = (end - first) * g.panel;
            const int64_t floats = keys * (g.key_units + g.value_stride / g.keys_per_unit + scales) + mean;
            const int64_t tiles = call_.num_tiles(s, g.tile_rows);
            for (int64_t head = 0; head < p_.nheads_k; ++head)
                jobs.push_back({{i, head, nullptr, nullptr, nullptr, nullptr, nullptr}, first, end, floats, tiles});
        }
        if (jobs.empty()) return true;
        provide_result();
        if (finish_together(jobs)) return run_heads(g, jobs);
        for (size_t begin = 0, end; begin < jobs.size(); begin = end) {
            int64_t floats = jobs[begin].floats;
            for (end = begin + 1; end < jobs.size() && (floats + jobs[end].floats) * 4 <= kWaveBytes; ++end)
                floats += jobs[end].floats;
            if (!run_wave(g, &jobs[begin], static_cast<int64_t>(end - begin), floats)) return false;
        }
        return true;
    }

    // Provides the pages of the result, if it is dense.
    void provide_result() const {
        char *begin = nullptr, *end = nullptr;
        int64_t bytes = 0;
        for (const Sequence& s : sequences_) {
            if (s.mask.seqlen_q == 0) continue;
            const int64_t last = (s.mask.seqlen_q - 1) * p_.out_stride_row + (p_.nheads - 1) * p_.out_stride_head;
            char* const past_last = s.out + (last + p_.headdim_v) * call_.element_size;
            begin = begin == nullptr ? s.out : std::min(begin, s.out);
            end = std::max(end, past_last);
            bytes += s.mask.seqlen_q * p_.nheads * p_.headdim_v * call_.element_size;
        }
        if (end - begin == bytes) provide_pages(begin, bytes, num_threads_);
    }

    // Whether to give each thread whole heads, if that takes little longer. Then no thread waits for panels, and panels stay
    // in its caches.
    bool finish_together(const std::vector<PrefillJob>& jobs) const {
        int64_t longest = 0, all = 0, floats = 0;
        for (const PrefillJob& job : jobs) {
            const int64_t work = job.tiles * job.num_panels();
            longest = std::max(longest, work);
            floats = std::max(floats, job.floats);
            all += work;
        }
        const int64_t rounds = divide_up(static_cast<int64_t>(jobs.size()), num_threads_);
        return floats * 4 <= kOwnBytes && longest * rounds * num_threads_ <= kFinishTogether * all;
    }

    bool run_heads(const PanelGeometry& g, const std::vector<PrefillJob>& jobs) {
        int64_t floats = g.scratch_floats;
        for (const PrefillJob& job : jobs) floats = std::max(floats, g.scratch_floats + job.floats);
        floats = divide_up(floats, 16) * 16;  // each thread gets whole cache lines
        Arena arena(floats * num_threads_ * sizeof(float));
        if (arena.data() == nullptr) return false;
        float* working = reinterpret_cast<float*>(arena.data());
        parallel_for(static_cast<int64_t>(jobs.size()), num_threads_, [&](int64_t index, int slot) {
            PrefillJob job = jobs[index];
            float* scratch = working + slot * floats;
            place(g, job, scratch + g.scratch_floats);
            if (multiplies_int8(p_)) kernels_.key_mean(call_, job.head);
            for (int64_t panel = job.first_panel; panel < job.end_panel; ++panel) kernels_.pack_panel(call_, job.head, panel);
            for (int64_t tile = 0; tile < job.tiles; ++tile) kernels_.prefill_tile(call_, job.head, tile, scratch);
        });
        return true;
    }

    // Gives a job its panels. Kernels address them by key, starting at key 0 even if the first panels are not needed.
    void place(const PanelGeometry& g, PrefillJob& job, float* memory) const {
        const int64_t keys = job.num_panels() * g.panel;
        job.head.keys = memory - job.first_panel * g.panel * g.key_units;
        job.head.values = memory + keys * g.key_units - job.first_panel * g.panel / g.keys_per_unit * g.value_stride;
        float* scales = memory + keys * (g.key_units + g.value_stride / g.keys_per_unit) - job.first_panel * g.panel;
        if (is_quantized(p_)) {
            job.head.key_scales = scales;
            job.head.value_scales = scales + keys;
        }
        if (multiplies_int8(p_)) {
            job.head.key_scales = scales;
            job.head.key_mean = scales + job.end_panel * g.panel;
        }
    }

    bool run_wave(const PanelGeometry& g, PrefillJob* jobs, int64_t count, int64_t floats) {
        // Each thread gets whole cache lines.
        const int64_t scratch = divide_up(g.scratch_floats, 16) * 16;
        Arena arena((scratch * num_threads_ + floats) * sizeof(float));
        if (arena.data() == nullptr) return false;
        float* working = reinterpret_cast<float*>(arena.data());
        float* panel_memory = working + scratch * num_threads_;
        std::vector<int64_t> panels{0}, tiles{0};
        std::vector<int64_t> first_of_sequence;  // job
        for (int64_t i = 0; i < count; ++i) {
            PrefillJob& job = jobs[i];
            place(g, job, panel_memory);
            panel_memory += job.floats;
            const bool continues = i > 0 && jobs[i - 1].head.sequence == job.head.sequence;
            if (!continues) {
                first_of_sequence.push_back(i);
                panels.push_back(panels.back());
            }
            panels.back() += job.num_panels();
            tiles.push_back(tiles.back() + job.tiles);
        }
        auto find = [](const std::vector<int64_t>& starts, int64_t index) {
            return std::upper_bound(starts.begin(), starts.end(), index) - starts.begin() - 1;
        };
        if (multiplies_int8(p_))
            parallel_for(count, num_threads_, [&](int64_t index, int) { kernels_.key_mean(call_, jobs[index].head); });
        parallel_for(panels.back(), num_threads_, [&](int64_t index, int) {
            // Heads vary fastest, as the heads of a token are often neighbours in memory.
            const auto sequence = find(panels, index);
            const int64_t first = first_of_sequence[sequence];
            const int64_t num_heads = (panels[sequence + 1] - panels[sequence]) / jobs[first].num_panels();
            const int64_t within = index - panels[sequence];
            const PrefillJob& job = jobs[first + within % num_heads];
            kernels_.pack_panel(call_, job.head, job.first_panel + within / num_heads);
        });
        // The last tiles of a causal head have the most keys, so they start first, and threads finish together.
        parallel_for(tiles.back(), num_threads_, [&](int64_t index, int slot) {
            const auto i = find(tiles, index);
            const int64_t tile = tiles[i + 1] - 1 - index;
            kernels_.prefill_tile(call_, jobs[i].head, tile, working + slot * scratch);
        });
        return true;
    }

    const AttentionKernels& kernels_;
    const FaAttentionParams& p_;
    Call call_;
    std::vector<Sequence> sequences_;
    int num_threads_ = 1;
    std::vector<DecodeSplit> splits_;
    struct SplitGroup {
        int64_t first;  // split
        int64_t count;
    };
    std::vector<SplitGroup> tasks_;  // splits that are read together; they are neighbours
    std::vector<SplitGroup> heads_;  // splits of one head; they are nheads_k apart
};

}  // namespace

bool forward(const AttentionKernels& kernels, const FaAttentionParams& params) {
    try {
        return Forward(kernels, params).run();
    } catch (const std::exception&) {  // no memory for lists; tasks throw nothing
        return false;
    }
}

}  // namespace fastattention
