// The products of a latent decode on AMX tiles, which read the weights row by row.
#pragma once

namespace FA_NAMESPACE {

template <>
struct LatentProducts<AmxPair> {
    static constexpr int64_t kWeightStride = kLatentKeys<AmxPair> / 2 + kRowPadding;

    static void score(const float* keys, int64_t key_stride, int64_t num_keys, const float* queries, int64_t units,
                      float* scores, int64_t rows, NextRows& next) {
        const FetchLines ahead = fetch_with(next, num_keys, rows, units);
        for (int64_t row = 0; row < rows; row += kLatentPanel)
            multiply_panel<false>(AmxPair{}, keys, key_stride, queries + in_panels(row, units), kLatentPanel, units,
                                  scores + in_panels(row, kLatentKeys<AmxPair>), kLatentPanel, num_keys,
                                  smaller(kLatentPanel, rows - row), ahead);
    }

    static void accumulate(const float* weights, const float* values, int64_t value_stride, int64_t units, float* acc_o,
                           int64_t acc_stride, int64_t rows, int64_t columns, NextRows& next) {
        multiply_panel<true>(AmxPair{}, weights, kWeightStride, values, value_stride, units, acc_o, acc_stride, rows, columns,
                             fetch_with(next, rows, columns, units));
    }

    FA_INLINE void store_weights(float* weights, int64_t pair, int64_t row, Vec pairs) {
        store(weights + (row + pair % kAmxTile) * kWeightStride + pair / kAmxTile * kAmxTile, pairs);
    }
    // Transposes squares of sixteen pairs and sixteen rows, which were stored by pair.
    static void finish_weights(float* weights, int64_t rows, int64_t pairs) {
        for (int64_t row = 0; row < rows; row += kAmxTile)
            for (int64_t pair = 0; pair < pairs; pair += kAmxTile)
                transpose_square(weights + row * kWeightStride + pair, kWeightStride);
    }

private:
    // Spreads the lines of `next` over the steps of a product.
    static FetchLines fetch_with(NextRows& next, int64_t rows, int64_t columns, int64_t units) {
        constexpr int64_t kBoth = 2 * kAmxTile;
        const int64_t steps = (rows + kBoth - 1) / kBoth * ((columns + kBoth - 1) / kBoth) * (units / kAmxTile);
        return {&next, (next.lines() + steps - 1) / steps};
    }
};

}  // namespace FA_NAMESPACE
