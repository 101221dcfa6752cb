// Four neighbouring elements of a row, in 16 or 32 bits each.
#pragma once

#include "element.cuh"
#include "numbers.cuh"

namespace fastattention {

// Formats of elements in memory. Four is four elements that are read and written together, Item one of them.
struct InElements {
    using Item = uint16_t;
    using Four = Words2;

    static FA_DEVICE Four load(const Item* from) { return load_written_64(from); }
    static FA_DEVICE void store(Item* to, const Four& four) { store_global_64(to, four); }
    static FA_DEVICE Item get(const Four& four, int i) { return static_cast<Item>(four.word[i / 2] >> i % 2 * 16); }
    // Sets element i, which must be zero.
    static FA_DEVICE void put(Four& four, int i, Item item) { four.word[i / 2] |= static_cast<uint32_t>(item) << i % 2 * 16; }
    static FA_DEVICE float widen(Item item) { return Element::widen(item); }
    static FA_DEVICE Four narrow(const float (&x)[4]) { return {Element::pack(x[0], x[1]), Element::pack(x[2], x[3])}; }

    // A 32-bit word has two elements.
    static FA_DEVICE Item item(uint32_t word, int i) { return static_cast<Item>(word >> i * 16); }
    static FA_DEVICE uint32_t word(const float* x) { return Element::pack(x[0], x[1]); }
};

struct InFloats {
    using Item = float;
    using Four = Words4;

    static FA_DEVICE Four load(const Item* from) { return load_written_128(from); }
    static FA_DEVICE void store(Item* to, const Four& four) { store_global_128(to, four); }
    static FA_DEVICE Item get(const Four& four, int i) { return as_float(four.word[i]); }
    static FA_DEVICE void put(Four& four, int i, Item item) { four.word[i] = as_bits(item); }
    static FA_DEVICE float widen(Item item) { return item; }
    static FA_DEVICE Four narrow(const float (&x)[4]) { return {as_bits(x[0]), as_bits(x[1]), as_bits(x[2]), as_bits(x[3])}; }

    static FA_DEVICE Item item(uint32_t word, int) { return as_float(word); }
    static FA_DEVICE uint32_t word(const float* x) { return as_bits(x[0]); }
};

template <bool kAsFloats>
struct FormatOf {
    using Type = InElements;
};
template <>
struct FormatOf<true> {
    using Type = InFloats;
};

// Up to four columns, at any alignment. They stay in their format in memory: converting them would wait for the load.
template <class Format>
class Columns {
public:
    using Item = typename Format::Item;
    using Four = typename Format::Four;

    static FA_DEVICE Four read(const Item* from, int count) {
        if (are_together(from, count)) return Format::load(from);
        Four four{};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i < count) Format::put(four, i, from[i]);
        return four;
    }

    static FA_DEVICE void write(Item* to, int count, const Four& four) {
        if (are_together(to, count)) return Format::store(to, four);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i < count) to[i] = Format::get(four, i);
    }

private:
    static FA_DEVICE bool are_together(const Item* at, int count) {
        return count >= 4 && reinterpret_cast<int64_t>(at) % static_cast<int64_t>(sizeof(Four)) == 0;
    }
};

}  // namespace fastattention
