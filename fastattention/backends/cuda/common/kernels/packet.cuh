// 16 aligned bytes of elements in 16 or 32 bits each.
#pragma once

#include "columns.cuh"

namespace fastattention {

template <class Format>
class Packet {
public:
    using Item = typename Format::Item;
    static constexpr int kNumbers = 16 / sizeof(Item);

    Packet() = default;

    // Bypasses the L1 cache, which does not see writes of other GPUs.
    static FA_DEVICE Packet read(const Item* from) { return Packet(load_written_128(from)); }

    static FA_DEVICE Packet read_shared(uint32_t address) { return Packet(load_shared_128(address)); }

    static FA_DEVICE Packet narrowed(const float (&x)[kNumbers]) {
        Words4 words;
#pragma unroll
        for (int i = 0; i < 4; ++i) words.word[i] = Format::word(x + i * (kNumbers / 4));
        return Packet(words);
    }

    FA_DEVICE void add_to(float (&sum)[kNumbers]) const {
#pragma unroll
        for (int i = 0; i < kNumbers; ++i) sum[i] += Format::widen(item(i));
    }

    // Writes its first `count` elements, or all, to `to`, which need not be aligned.
    FA_DEVICE void write(Item* to, int64_t count) const {
        if (count >= kNumbers && reinterpret_cast<int64_t>(to) % 16 == 0) return store_global_128(to, words_);
#pragma unroll
        for (int i = 0; i < kNumbers; ++i)
            if (i < count) to[i] = item(i);
    }

private:
    explicit FA_DEVICE Packet(const Words4& words) : words_(words) {}

    FA_DEVICE Item item(int i) const { return Format::item(words_.word[i * 4 / kNumbers], i % (kNumbers / 4)); }

    Words4 words_;
};

}  // namespace fastattention
