// The calls whose instructions are traced, each a function of its own. The script appends this to kernels.cpp, for one
// instruction set.
#include <cstdlib>
#include <initializer_list>

namespace FA_NAMESPACE {

#define FA_CALL(name) extern "C" __attribute__((noipa, used)) void name

static constexpr int64_t kTracedHeaddim = 128, kTracedRows = 48, kTracedKeys = 32, kTracedScores = 256;

// Memory that calls work on: the floats 0.5, whose bits are also harmless as other elements.
static float* traced_memory(int64_t floats) {
    auto* memory = static_cast<float*>(aligned_alloc(64, round_up(floats * 4, 64)));
    for (int64_t i = 0; i < floats; ++i) memory[i] = 0.5f;
    return memory;
}

// Prefill: C += A B for a panel of B, of units that hold a query of kTracedHeaddim elements.
template <class Unit>
static void call_product(void (*call)(const float*, int64_t, const float*, int64_t, int64_t, float*, int64_t, int64_t,
                                      int64_t)) {
    constexpr int64_t kUnits = kTracedHeaddim / Unit::kElements, kStride = kUnits + kRowPadding;
    call(traced_memory(kTracedRows * kStride), kStride, traced_memory((kUnits + 1) * kPanel) + kPanel, kPanel, kUnits,
         traced_memory(kTracedRows * kScoreStride), kScoreStride, kTracedRows, kPanel);
}
#define FA_PRODUCT(name, Unit)                                                                                           \
    FA_CALL(product_##name)(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth, float* c, \
                            int64_t c_stride, int64_t rows, int64_t columns) {                                           \
        multiply_panel<true>(Unit{}, a, a_stride, b, b_stride, depth, c, c_stride, rows, columns);                       \
    }

// Softmax of prefill.
template <class Unit>
static void call_softmax(void (*call)(const RowSoftmax<Unit>&, float*, int64_t, RunningRow)) {
    FaAttentionParams params{};
    params.softmax_scale = 0.125;
    Call of{};
    of.params = &params;
    const Sequence sequence{};
    float max = 1.0f;
    call(RowSoftmax<Unit>(of, sequence), traced_memory(kTracedScores), kTracedScores,
         {&max, traced_memory(Vec::kWidth), traced_memory(kTracedHeaddim), kTracedHeaddim});
}
#define FA_SOFTMAX(name, Unit)                                                                              \
    FA_CALL(softmax_##name)(const RowSoftmax<Unit>& softmax, float* scores, int64_t keys, RunningRow row) { \
        softmax.weigh(scores, 0, keys, keys, row, nullptr);                                                 \
    }

// Decode of one head from rows.
template <class Element>
static const KeyBlock<Element>& traced_block() {
    static KeyBlock<Element> block{};
    float* memory = traced_memory(2 * kTracedKeys * kTracedHeaddim);
    for (KeyBlockRows<Element>* rows : {&block.keys, &block.values}) {
        for (int64_t j = 0; j < rows->kTable; ++j)
            rows->table[j] = reinterpret_cast<char*>(memory) + j % (2 * kTracedKeys) * kTracedHeaddim * sizeof(Element);
        rows->addresses = rows->table;
        rows->head_stride = rows->headdim = kTracedHeaddim;
    }
    block.n = block.size = block.ahead = kTracedKeys;
    block.heads = 1;
    return block;
}
template <class Element>
static void call_score(void (*call)(const KeyBlock<Element>&, int64_t, const float*, int64_t, int64_t, float*)) {
    call(traced_block<Element>(), 0, traced_memory(8 * kTracedHeaddim), kTracedHeaddim, kTracedHeaddim,
         traced_memory(8 * kTracedKeys));
}
template <class Element>
static void call_accumulate(void (*call)(const KeyBlock<Element>&, int64_t, const float*, const float*, float*, int64_t,
                                         int64_t)) {
    call(traced_block<Element>(), 0, traced_memory(8 * kTracedKeys), traced_memory(8), traced_memory(8 * kTracedHeaddim),
         kTracedHeaddim, kTracedHeaddim);
}
#define FA_DECODE(name, Dot, rows)                                                                                         \
    FA_CALL(score_##name##_##rows)(const KeyBlock<Dot::Stored>& block, int64_t head, const float* queries, int64_t stride, \
                                   int64_t headdim, float* scores) {                                                       \
        score_block<rows>(Dot{}, block, head, queries, stride, headdim, scores);                                           \
    }                                                                                                                      \
    FA_CALL(accumulate_##name##_##rows)(const KeyBlock<Dot::Stored>& block, int64_t head, const float* probabilities,      \
                                        const float* units, float* acc_o, int64_t stride, int64_t headdim_v) {             \
        accumulate_block<rows>(Dot{}, block, head, probabilities, units, acc_o, stride, headdim_v);                        \
    }
#define FA_DECODES(name, Dot) FA_DECODE(name, Dot, 1) FA_DECODE(name, Dot, 4)

// As kernels.cpp chooses for these element types.
using Float32Dot = Wide<float>;
#ifdef FA_HAS_HALF_DOT
using Float16Dot = Halves;
#else
using Float16Dot = Wide<Float16>;
#endif
#ifdef FA_HAS_BF16_DOT
using Bfloat16Dot = Paired;
#else
using Bfloat16Dot = WidePairs;
#endif
#if defined(FA_HAS_HALF_DOT)
using Int8Arithmetic = BytePlanes;
#elif defined(FA_HAS_WORDS)
using Int8Arithmetic = FixedPoint;
#else
using Int8Arithmetic = Wide<Int8>;
#endif

FA_PRODUCT(float32, FloatUnit)
FA_SOFTMAX(float32, FloatUnit)
#ifdef FA_HAS_MATRICES
FA_PRODUCT(bfloat16, MatrixPair)
FA_SOFTMAX(bfloat16, MatrixPair)
#endif
#ifdef FA_HAS_QUADS
FA_PRODUCT(int8, KeyQuad)
#endif
FA_DECODES(float32, Float32Dot)
FA_DECODES(float16, Float16Dot)
FA_DECODES(bfloat16, Bfloat16Dot)
FA_DECODES(int8, Int8Arithmetic)

static void call_all() {
    call_product<FloatUnit>(product_float32);
    call_softmax<FloatUnit>(softmax_float32);
#ifdef FA_HAS_MATRICES
    call_product<MatrixPair>(product_bfloat16);
    call_softmax<MatrixPair>(softmax_bfloat16);
#endif
#ifdef FA_HAS_QUADS
    call_product<KeyQuad>(product_int8);
#endif
#define FA_CALL_DECODES(name)               \
    call_score(score_##name##_1);           \
    call_score(score_##name##_4);           \
    call_accumulate(accumulate_##name##_1); \
    call_accumulate(accumulate_##name##_4);
    FA_CALL_DECODES(float32)
    FA_CALL_DECODES(float16)
    FA_CALL_DECODES(bfloat16)
    FA_CALL_DECODES(int8)
}

}  // namespace FA_NAMESPACE

// Calls every function once.
int main() { FA_NAMESPACE::call_all(); }
