// A block of keys and values that decode reads in place, of one head or of several that take turns, and the order in which
// later rows are prefetched.
#pragma once

namespace FA_NAMESPACE {

static constexpr int kMaxGroup = Vec::kWidth < 8 ? Vec::kWidth : 8;  // query rows that are processed together
static constexpr int64_t kBlockKeys = 128;
// Keys by which prefetching runs ahead: 64 rows of 256 bytes are 16 KB, well under a L1 cache and enough to cover
// the latency of memory.
static constexpr int64_t kAheadKeys = 64;
// Blocks of rows with more bytes have half as many keys and are prefetched half as far ahead, so that the L2 cache holds
// them like those of shorter rows. If keys and values are in the same memory, a block's keys are still in the cache when
// they are read as values.
static constexpr int64_t kLongRow = 1024;
// Heads that take turns need short blocks: each is prefetched whole before it begins. Blocks of a quantized cache are
// longer: they have fewer bytes per key, and each ends by adding integer sums to floats
// (docs/decisions/0005-read-neighbouring-heads-together.md).
static constexpr int64_t kTurnKeys = 16, kQuantizedTurnKeys = 64;

// Addresses of the rows of one block and of rows to prefetch. After the last key they repeat it. Short blocks share a table.
template <class Element, int64_t kTable = kBlockKeys + kAheadKeys>
struct KeyBlockRows {
    char* table[kTable];
    int64_t table_begin = 0, table_end = 0;  // keys
    char* const* addresses;
    int64_t head_stride;  // in elements
    int64_t headdim;

    __attribute__((always_inline)) const Element* operator[](int64_t j) const {
        return reinterpret_cast<const Element*>(addresses[j]);
    }

    void locate(const Rows& from, int64_t begin, int64_t end, int64_t count) {
        if (begin + count > table_end) {
            const int64_t known = smaller(kTable, end - begin);
            from.addresses(begin, known, table);
            for (int64_t j = known; j < kTable; ++j) table[j] = table[known - 1];
            table_begin = begin;
            table_end = begin + kTable;
        }
        addresses = table + (begin - table_begin);
    }
};

// The scales of a quantized cache, for the first of a block's heads.
struct ScaleRows {
    Rows keys, values;
    int64_t key_head_stride, value_head_stride;  // in floats
};

// The keys and values of `heads` neighbouring heads.
template <class Element>
struct KeyBlock {
    KeyBlockRows<Element> keys, values;
    ScaleRows scales;
    int64_t first;  // key
    int64_t n;      // keys
    int64_t heads;
    int64_t size;   // keys of a whole block
    int64_t ahead;  // keys by which prefetching runs ahead

    // The scales of one head's keys and values.
    void load_scales(int64_t head, float* key_scales, float* value_scales) const {
        constexpr int64_t kSize = sizeof(float);
        FA_NAMESPACE::load_scales(scales.keys.shifted(head * scales.key_head_stride * kSize), first, n, key_scales);
        FA_NAMESPACE::load_scales(scales.values.shifted(head * scales.value_head_stride * kSize), first, n, value_scales);
    }

    // Locates a block from key `begin` on, of a range that ends at `end`.
    void locate(const Rows& k, const Rows& v, int64_t begin, int64_t end) {
        first = begin;
        n = smaller(size, end - begin);
        keys.locate(k, begin, end, size + ahead);
        values.locate(v, begin, end, size + ahead);
    }
};

// Keys and values of one head at equal distances, and the first key and value after them.
struct Run {
    const char *keys, *values, *next_keys, *next_values;
    int64_t key_stride, value_stride;  // in bytes
    int64_t n;

    // Locates whole blocks from key `begin` on, of a range that ends at `end`.
    static Run locate(const Rows& k, const Rows& v, int64_t begin, int64_t end, int64_t block) {
        const int64_t n = v.equally_spaced(begin, k.equally_spaced(begin, end - begin)) / block * block;
        const int64_t next = smaller(begin + n, end - 1);
        return {k(begin), v(begin), k(next), v(next), k.stride_row, v.stride_row, n};
    }

    // Key j of the run or of what follows it, and value j.
    const char* key(int64_t j) const { return j < n ? keys + j * key_stride : next_keys + (j - n) * key_stride; }
    const char* value(int64_t j) const { return j < n ? values + j * value_stride : next_values + (j - n) * value_stride; }
};

// Runs through the rows to prefetch while one head of a block is processed: token by token and in each through the heads.
template <class Element>
class PrefetchCursor {
public:
    PrefetchCursor(const KeyBlockRows<Element>& rows, const KeyBlock<Element>& block, int64_t head)
        : PrefetchCursor(rows, block, head, block.ahead) {}

    // from: the row of `rows` with which the block's first head begins.
    PrefetchCursor(const KeyBlockRows<Element>& rows, const KeyBlock<Element>& block, int64_t head, int64_t from)
        : row_(rows.addresses + from + head * block.n / block.heads),
          head_(head * block.n % block.heads),
          rows_left_(block.size),
          heads_(block.heads),
          head_stride_(rows.head_stride),
          headdim_(rows.headdim) {}

    // Prefetches the next cache line of a row, or the first line of the next row; none after as many rows as a block has.
    __attribute__((always_inline)) void prefetch_line() {
        constexpr int64_t kLine = 64 / sizeof(Element);
        if (rows_left_ == 0) return;
        prefetch(reinterpret_cast<const Element*>(*row_) + head_ * head_stride_ + column_);
        column_ += kLine;
        if (column_ < headdim_) return;
        column_ = 0;
        --rows_left_;
        next_row();
    }

    // Prefetches n elements of the next row, starting at `column`.
    __attribute__((always_inline)) void prefetch_next(int64_t column, int64_t n) {
        prefetch_bytes(reinterpret_cast<const Element*>(*row_) + head_ * head_stride_ + column,
                       n * static_cast<int64_t>(sizeof(Element)));
        next_row();
    }

private:
    __attribute__((always_inline)) void next_row() {
        if (++head_ == heads_) {
            head_ = 0;
            ++row_;
        }
    }

    char* const* row_;
    int64_t head_, rows_left_, column_ = 0;
    const int64_t heads_, head_stride_, headdim_;
};

}  // namespace FA_NAMESPACE
