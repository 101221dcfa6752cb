// The working memory of a chunk of linear attention.
#pragma once

namespace FA_NAMESPACE {

static constexpr int64_t kPartTokens = 16;
// Key dimensions that are processed at a time within a part: as many vectors as registers hold.
static constexpr int64_t kPartVectors = 4, kPartColumns = kPartVectors * Vec::kWidth;
static constexpr int64_t kPartTileRows = (kPartTokens + kRows - 1) / kRows * kRows;

// The offsets of the buffers of a chunk, in floats from the beginning of the working memory.
template <class Unit>
struct LinearLayout {
    // Scores form a triangle. It is computed in steps of this many rows, each step up to its diagonal.
    static constexpr int64_t kDepthStep = Unit::kElements * Unit::kDepthStep;
    static constexpr int64_t kStepRows = common_multiple(Unit::kRowStep, kDepthStep);
    static constexpr bool kPairs = Unit::kElements == 2;

    int64_t chunk;
    int64_t key_columns;  // headdim_k, padded to a multiple of kPartColumns
    int64_t key_depth, key_rows;  // headdim_k, padded as the depth of a product and as the rows of its result
    int64_t key_stride, value_stride;
    int64_t state_floats;
    int64_t keys, asking, queries, keys_t, scores, query_scores, held, values, states, gates, betas, row, left, right, total;

    LinearLayout(const FaLinearParams& p, int64_t num_columns, int64_t num_heads) : chunk(p.chunk) {
        key_columns = round_up(p.headdim_k, kPartColumns);
        key_depth = round_up(p.headdim_k, kDepthStep);
        key_rows = round_up(key_depth, Unit::kRowStep);
        key_stride = key_columns + kRowPadding;
        value_stride =
            round_up(num_columns, common_multiple(Vec::kWidth, kDepthStep)) + (num_columns > kPanel ? kRowPadding : 0);
        int64_t at = 0;
        const auto take = [&](int64_t floats) {
            const int64_t here = at;
            at += round_up(floats, kRowPadding);
            return here;
        };
        const int64_t tokens = 2 * chunk;  // asking keys, then queries, as rows of one matrix
        // Gates of key dimensions are multiplied into keys and into asking keys, each in its own way.
        const bool copies_keys = p.gate_per_key && p.overwrites;
        // A tile of rows may extend past the last token.
        keys = take((tokens + (copies_keys ? chunk : 0) + kPartTileRows) * key_stride);
        asking = keys + (copies_keys ? chunk : 0) * key_stride;
        queries = asking + chunk * key_stride;
        keys_t = take(larger(key_rows, key_columns) * chunk);
        scores = take((chunk + kPartTileRows) * chunk);
        query_scores = take((chunk + kPartTileRows) * chunk);
        held = take((tokens + kPartTileRows) * value_stride);
        values = take((chunk + FloatUnit::kRowStep) * value_stride);
        state_floats = larger(key_rows, round_up(p.headdim_k, Vec::kWidth)) * value_stride;
        states = take(num_heads * state_floats);
        gates = take(chunk * (p.gate_per_key ? key_stride : 1));
        betas = take(chunk);
        row = take(larger(2 * chunk, (1 + chunk / kPartTokens) * key_columns + kPartTileRows * key_stride));
        left = take(kPairs ? larger(tokens * (key_stride / 2 + kRowPadding), key_rows * (chunk / 2 + kRowPadding)) : 0);
        right = take(kPairs ? larger(key_rows, chunk) / 2 * larger(value_stride, chunk) : 0);
        total = at;
    }
};

}  // namespace FA_NAMESPACE
