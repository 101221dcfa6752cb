// The kernels of one instruction set. The build compiles this file once for each, with that set's compiler flags and
//   FA_NAMESPACE     the namespace of its code, also its name
//   FA_SIMD_HEADER   the header of its vectors
//   FA_HAS_BF16_DOT  if it has dot products of pairs of bfloat16; on Arm also products of matrices
//   FA_HAS_HALF_DOT  if it multiplies float16 and adds to float32, and has dot products of int8, both of Arm
//   FA_HAS_VNNI      if it multiplies and adds pairs of 16-bit integers in one instruction
//   FA_HAS_AMX       if it has AMX tiles of bfloat16 and int8
#include FA_SIMD_HEADER

#include "common/wait_for.hpp"
#include "kernels.hpp"

namespace FA_NAMESPACE {
using namespace fastattention;
}

// The order matters: headers use those above them. A family's headers use common ones, but none of another family.
#include "common/math.hpp"
#include "common/rows.hpp"
#include "common/gemm.hpp"
#ifdef FA_HAS_AMX
#include "common/gemm_amx.hpp"
#endif
#ifdef FA_HAS_MATRICES
#include "common/gemm_matrices.hpp"
#endif
#include "common/peaks.hpp"

#include "convolution/filters.hpp"
#include "convolution/forward.hpp"
#include "convolution/backward.hpp"

#include "indexer/scores.hpp"

#include "linear/tokens.hpp"
#include "linear/chunk_layout.hpp"
#include "linear/chunk_products.hpp"
#include "linear/chunks.hpp"
#include "linear/gradient_layout.hpp"
#include "linear/gradients.hpp"
#include "linear/head_gate_gradients.hpp"
#include "linear/key_gate_gradients.hpp"
#include "linear/recurrent.hpp"

#include "attention/scores.hpp"
#include "attention/query_rows.hpp"
#include "attention/dropout.hpp"
#include "attention/quantize.hpp"
#include "attention/append.hpp"
#include "attention/row_softmax.hpp"
#include "attention/int8_products.hpp"
#include "attention/panels.hpp"
#include "attention/tile_weights.hpp"
#ifdef FA_HAS_AMX
#include "attention/piece_weights_amx.hpp"
#endif
#include "attention/prefill.hpp"
#include "attention/panel_cache.hpp"
#include "attention/backward_layout.hpp"
#include "attention/backward_rows.hpp"
#include "attention/score_gradients.hpp"
#ifdef FA_HAS_AMX
#include "attention/score_gradients_amx.hpp"
#endif
#include "attention/backward.hpp"
#include "attention/decode_key_block.hpp"
#include "attention/decode_dot.hpp"
#ifdef FA_HAS_AMX
#include "attention/decode_amx.hpp"
#include "attention/decode_rows_amx.hpp"
#endif
#ifdef FA_HAS_HALF_DOT
#include "attention/decode_bytes.hpp"
#endif
#include "attention/decode.hpp"
#include "attention/latent_products.hpp"
#ifdef FA_HAS_AMX
#include "attention/latent_products_amx.hpp"
#endif
#include "attention/decode_latent.hpp"
#include "attention/decode_merge.hpp"
#include "attention/decode_panels.hpp"
#ifdef FA_HAS_AMX
#include "attention/decode_panels_amx.hpp"
#endif

namespace FA_NAMESPACE {

// Which type and units serve an element type is decided here only. Unit serves prefill, Dot decode from rows, and CachedUnit
// a cache in panels.
template <class ElementType, class UnitType, class DotType, class CachedUnitType = UnitType>
struct Path {
    using Element = ElementType;
    using Unit = UnitType;
    using Dot = DotType;
    using CachedUnit = CachedUnitType;
};

template <class Use>
FA_INLINE auto with_path_of(int64_t dtype, Use&& use) {
    if (dtype == FA_FLOAT32) return use(Path<float, FloatUnit, Wide<float>>{});
#ifdef FA_HAS_HALF_DOT
    if (dtype == FA_FLOAT16) return use(Path<Float16, FloatUnit, Halves, WideUnit<Float16>>{});
#else
    if (dtype == FA_FLOAT16) return use(Path<Float16, FloatUnit, Wide<Float16>, WideUnit<Float16>>{});
#endif
#if defined(FA_HAS_AMX)
    return use(Path<Bfloat16, AmxPair, Bfloat16Tiles>{});
#elif defined(FA_HAS_MATRICES)
    return use(Path<Bfloat16, MatrixPair, Paired, Bfloat16Pair>{});
#elif defined(FA_HAS_BF16_DOT)
    return use(Path<Bfloat16, Bfloat16Pair, Paired>{});
#else
    return use(Path<Bfloat16, FloatUnit, WidePairs, WidePair>{});
#endif
}

template <class Use>
FA_INLINE auto with_path(const FaAttentionParams& p, Use&& use) {
    return with_path_of(p.dtype, use);
}

// Passes the unit in which prefill multiplies queries and keys. Keys of a quantized cache are not quantized again.
template <class Stored, class Unit, class Use>
FA_INLINE auto with_key_unit([[maybe_unused]] const FaAttentionParams& p, Use&& use) {
#ifdef FA_HAS_QUADS
    if constexpr (!kQuantized<Stored>)
        if (multiplies_int8(p)) return use(KeyQuad{});
#endif
    return use(Unit{});
}

// Passes the element type of the caches: that of q, or a quantized one.
template <class Element, class Use>
FA_INLINE auto with_stored(const FaAttentionParams& p, Use&& use) {
    if (p.cache_dtype == FA_INT8) return use(Int8{});
    if (p.cache_dtype == FA_FLOAT8) return use(Float8{});
    return use(Element{});
}

// Passes the class of a decode's arithmetic.
template <class Use>
FA_INLINE auto with_dot(const FaAttentionParams& p, Use&& use) {
    // Fixed point is as accurate as half precision, but not as float32.
#ifdef FA_HAS_HALF_DOT
    if (p.cache_dtype == FA_INT8 && p.dtype != FA_FLOAT32) return use(BytePlanes{});
#elif defined(FA_HAS_WORDS)
    if (p.cache_dtype == FA_INT8 && p.dtype != FA_FLOAT32) return use(FixedPoint{});
#endif
    if (p.cache_dtype == FA_INT8) return use(Wide<Int8>{});
    if (p.cache_dtype == FA_FLOAT8) return use(Wide<Float8>{});
    return with_path(p, [&](auto path) { return use(typename decltype(path)::Dot{}); });
}

static PanelGeometry panel_geometry_of(const FaAttentionParams& params) {
    return with_path(params, [&](auto path) {
        using Path = decltype(path);
        using Unit = typename Path::Unit;
        return with_key_unit<typename Path::Element, Unit>(
            params, [&](auto key_unit) { return panel_geometry<Unit, decltype(key_unit)>(params); });
    });
}

static void key_mean_of(const Call& call, const HeadPanels& head) {
    with_path(*call.params, [&](auto path) { key_mean<typename decltype(path)::Element>(call, head); });
}

static void pack_panel_of(const Call& call, const HeadPanels& head, int64_t panel) {
    with_path(*call.params, [&](auto path) {
        using Path = decltype(path);
        using Element = typename Path::Element;
        if (call.params->panel_size > 0)
            return pack_cached_panel<Element, typename Path::CachedUnit>(call, head, panel, typename Path::Unit{});
        with_stored<Element>(*call.params, [&](auto stored) {
            with_key_unit<decltype(stored), typename Path::Unit>(*call.params, [&](auto key_unit) {
                pack_panel<decltype(stored), decltype(key_unit), typename Path::Unit>(call, head, panel);
            });
        });
    });
}

static void prefill_tile_of(const Call& call, const HeadPanels& head, int64_t tile, float* scratch) {
    with_path(*call.params, [&](auto path) {
        using Path = decltype(path);
        using Unit = typename Path::Unit;
        with_key_unit<typename Path::Element, Unit>(*call.params, [&](auto key_unit) {
            prefill_tile<typename Path::Element, decltype(key_unit), Unit>(call, head, tile, scratch);
        });
    });
}

static int64_t split_stride_of(const FaAttentionParams& params) {
    if (params.panel_size > 0) return round_up(params.headdim_v, Vec::kWidth);
    return with_dot(params, [&](auto dot) { return split_stride<decltype(dot)>(params); });
}

static void decode_panel_splits_of(const Call& call, const DecodeSplit* splits, int64_t num_heads) {
    with_path(*call.params, [&](auto path) {
        using Path = decltype(path);
        for (int64_t head = 0; head < num_heads; ++head)
            decode_panel_split<typename Path::Element, typename Path::CachedUnit>(call, splits[head]);
    });
}

static void decode_splits_of(const Call& call, const DecodeSplit* splits, int64_t num_heads) {
    if (call.params->panel_size > 0) return decode_panel_splits_of(call, splits, num_heads);
    with_dot(*call.params, [&](auto dot) {
        using Dot = decltype(dot);
        decode_splits<typename Dot::Stored, Dot>(call, splits, num_heads);
    });
}

static void decode_latent_of(const Call& call, const DecodeSplit& split, float* scratch) {
    const int64_t stride = split_stride_of(*call.params);
    with_path(*call.params, [&](auto path) {
        using Path = decltype(path);
        with_stored<typename Path::Element>(*call.params, [&](auto stored) {
            decode_latent_split<decltype(stored), typename Path::Unit>(call, split, stride, scratch);
        });
    });
}

static int64_t latent_scratch_of(const FaAttentionParams& params) {
    return with_path(params, [&](auto path) { return LatentGeometry<typename decltype(path)::Unit>(params).total; });
}

static void decode_merge_of(const Call& call, const DecodeSplit* splits, int64_t num_splits, int64_t stride) {
    with_path(*call.params, [&](auto path) {
        decode_merge<typename decltype(path)::Element>(call, splits, num_splits, stride, split_stride_of(*call.params));
    });
}

static void append_token_of(const Call& call, const Sequence& sequence, int64_t token) {
    with_path(*call.params, [&](auto path) {
        using Element = typename decltype(path)::Element;
        if (call.params->panel_size > 0) return append_panel_token<Element>(call, sequence, token);
        with_stored<Element>(*call.params,
                             [&](auto stored) { append_token<Element, decltype(stored)>(call, sequence, token); });
    });
}

static BackwardGeometry backward_geometry_of(const FaAttentionParams& params) {
    return with_path(params, [&](auto path) { return backward_geometry<typename decltype(path)::Unit>(params); });
}

static void pack_rows_of(const Call& call, const FaGradients& gradients, const BackwardHead& head, int64_t tile) {
    with_path(*call.params, [&](auto path) {
        using Path = decltype(path);
        RowPacker<typename Path::Element, typename Path::Unit>(call, gradients, head, tile).run();
    });
}

static void backward_chunk_of(const Call& call, const FaGradients& gradients, const BackwardHead& head, int64_t chunk,
                              float* scratch) {
    with_path(*call.params, [&](auto path) {
        using Path = decltype(path);
        BackwardChunk<typename Path::Element, typename Path::Unit>(call, gradients, head, chunk, scratch).run();
    });
}

static void linear_of(const FaLinearParams& params, const LinearTask& task, float* scratch) {
    const FlushDenormals flush;
    with_path_of(params.dtype, [&](auto path) {
        using Path = decltype(path);
        if (params.chunk > 0) {
            LinearChunks<typename Path::Element, typename Path::Unit>(params, task, scratch).run();
        } else {
            LinearSteps<typename Path::Element>(params, task, scratch).run();
        }
    });
}

static int64_t linear_scratch_of(const FaLinearParams& params, int64_t num_columns, int64_t num_heads) {
    return with_path_of(params.dtype, [&](auto path) {
        using Path = decltype(path);
        if (params.chunk > 0) return LinearLayout<typename Path::Unit>(params, num_columns, num_heads).total;
        return LinearSteps<typename Path::Element>::scratch_floats(params, num_columns);
    });
}

static void linear_backward_of(const FaLinearParams& params, const FaLinearGradients& gradients, const LinearTask& task,
                               int64_t part, float* scratch) {
    const FlushDenormals flush;
    with_path_of(params.dtype, [&](auto path) {
        using Path = decltype(path);
        LinearGradients<typename Path::Element, typename Path::Unit>(params, gradients, task, part, scratch).run();
    });
}

static int64_t linear_backward_scratch_of(const FaLinearParams& params, int64_t num_tokens) {
    return with_path_of(params.dtype,
                        [&](auto path) { return GradientLayout<typename decltype(path)::Unit>(params, num_tokens).total; });
}

// Passes the element type of x and the width of the filters, as a type with both.
template <class ElementType, int kFilterWidth>
struct FilterPath {
    using Element = ElementType;
    static constexpr int kWidth = kFilterWidth;
};

template <class Use>
FA_INLINE void with_filters(const FaConvolutionParams& params, Use&& use) {
    with_path_of(params.dtype, [&](auto path) {
        using Element = typename decltype(path)::Element;
        if (params.width == 2) return use(FilterPath<Element, 2>{});
        if (params.width == 3) return use(FilterPath<Element, 3>{});
        use(FilterPath<Element, 4>{});
    });
}

static void convolution_of(const FaConvolutionParams& params, const ConvolutionTask& task, float* scratch) {
    with_filters(params, [&](auto path) {
        using Path = decltype(path);
        ConvolutionForward<typename Path::Element, Path::kWidth>(params, task, scratch).run();
    });
}

static void convolution_backward_of(const FaConvolutionParams& params, const FaConvolutionGradients& gradients,
                                    const ConvolutionTask& task, float* sums, float* scratch) {
    with_filters(params, [&](auto path) {
        using Path = decltype(path);
        ConvolutionBackward<typename Path::Element, Path::kWidth>(params, gradients, task, sums, scratch).run();
    });
}

static void score_of(const FaIndexerParams& params, const IndexerTask& task, float* scratch) {
    with_path_of(params.dtype, [&](auto path) {
        using Path = decltype(path);
        IndexerScores<typename Path::Element, typename Path::Unit>(params, task, scratch).run();
    });
}

static int64_t indexer_scratch_of(const FaIndexerParams& params) {
    return with_path_of(params.dtype, [&](auto path) {
        using Path = decltype(path);
        return IndexerScores<typename Path::Element, typename Path::Unit>::scratch_floats(params);
    });
}

#define FA_STRING(name) #name
#define FA_NAME_OF(name) FA_STRING(name)

extern const Kernels kernels;
const Kernels kernels = {
    FA_NAME_OF(FA_NAMESPACE),
#if defined(FA_HAS_AMX)
    Int8Dot::kAmx,
#elif defined(FA_HAS_MATRICES)
    Int8Dot::kI8mm,
#elif defined(FA_HAS_LANES)
    Int8Dot::kDotProd,
#elif defined(FA_HAS_QUADS)
    Vec::kWidth == 16 ? Int8Dot::kAvx512Vnni : Int8Dot::kAvxVnni,
#else
    Int8Dot::kNone,
#endif
    {panel_geometry_of, key_mean_of, pack_panel_of, prefill_tile_of, split_stride_of, decode_splits_of, decode_latent_of,
     latent_scratch_of, decode_merge_of, append_token_of, backward_geometry_of, pack_rows_of, backward_chunk_of},
    {linear_of, linear_scratch_of, linear_backward_of, linear_backward_scratch_of},
    {convolution_of, convolution_backward_of, write_parameter_gradients},
    {score_of, indexer_scratch_of},
    fma_loop,
#ifdef FA_HAS_BF16_DOT
    bf16_dot_loop,
#else
    nullptr,
#endif
    read_loop,
};

}  // namespace FA_NAMESPACE
