// Prefill: a tile of query rows against panels of keys and values, some keys at a time with an online softmax.
#pragma once

namespace FA_NAMESPACE {

// What computes the weights of a tile.
template <class KeyUnit, class Unit>
struct WeightsOf {
    using Type = TileWeights<KeyUnit, Unit>;
};
#ifdef FA_HAS_AMX
template <int kElements, class Unit>
struct WeightsOf<AmxUnit<kElements>, Unit> {
    using Type = PieceWeights<AmxUnit<kElements>, Unit>;
};
#endif

// KeyUnit: the unit of products of queries and keys; Unit: the unit of products of weights and values.
template <class Element, class KeyUnit, class Unit>
class PrefillTile {
public:
    PrefillTile(const Call& call, const HeadPanels& head, int64_t tile, float* scratch)
        : work_(work_of(call, head, tile, scratch)),
          padded_rows_(padded_rows_of<Unit, KeyUnit>(work_.rows.count)),
          weights_(work_) {}

    void run() {
        KeyUnit::begin();  // uses AMX tiles whenever Unit does
        start();
        const FaAttentionParams& p = *work_.call.params;
        const QueryRow first = work_.at(0);
        const auto seen = work_.sequence.mask.rows(first.token, work_.at(work_.rows.count - 1).token);
        const int64_t step = p.dropout_p > 0.0 ? kDropoutKeys : kPanel;
        const BlockRow blocks = work_.call.block_row(work_.sequence, first.token, first.head);
        KeyRuns kept(blocks, seen.seen_begin / step * step, seen.seen_end);
        while (gather(kept)) {
            weights_.run(seen.classify(work_.runs[0].key, kept.past_last() - 1) == TileKind::kFull);
            accumulate_values();
        }
        finish();
        KeyUnit::end();
    }

private:
    static TileWork work_of(const Call& call, const HeadPanels& head, int64_t tile, float* scratch) {
        constexpr int64_t kMostRowStep = Unit::kRowStep > KeyUnit::kRowStep ? Unit::kRowStep : KeyUnit::kRowStep;
        static_assert(kMostBlockTileRows + kMostRowStep - 1 <= kRoomForRows);
        const PanelGeometry g = panel_geometry<Unit, KeyUnit>(*call.params);
        const Sequence& sequence = call.sequences[head.sequence];
        const int64_t query_units = g.key_units - kStartUnits<KeyUnit>, query_stride = query_units + kRowPadding;
        const int64_t room = padded_rows_of<Unit, KeyUnit>(g.tile_rows);
        float* scores = scratch + room * query_stride + kMaxHeaddim;
        float* acc_o = scores + room * kScoreStride;
        return {call,
                head,
                sequence,
                call.tile(sequence, tile, g.tile_rows),
                g.key_units,
                query_units,
                query_stride,
                g.value_columns,
                g.value_stride,
                scratch,
                scores,
                acc_o,
                acc_o + room * g.value_stride};
    }

    // Takes as many kept keys as a tile has room for; false if none are left.
    bool gather(KeyRuns& kept) {
        work_.num_runs = work_.columns = 0;
        while (work_.columns + kPanel <= kTileKeys && kept.next(kTileKeys - work_.columns)) {
            work_.runs[work_.num_runs++] = {kept.first(), work_.columns, kept.count()};
            work_.columns += kept.count();
        }
        return work_.num_runs > 0;
    }

    void start() {
        // Rows of a head are far apart if heads are side by side.
        for (int64_t row = 0; row < work_.rows.count; ++row)
            prefetch_query<Element>(work_.call, work_.sequence, work_.at(row));
        for (int64_t row = 0; row < padded_rows_; ++row) {
            work_.row_max[row] = -kInfinity;
            store(work_.row_sum + row * Vec::kWidth, zero());
            float* query = work_.queries + row * work_.query_stride;
            if (row < work_.rows.count) {
                load_query_units(row, query);
            } else {
                // Filled by bytes: in an int8 query the offset stands for 0.
                memset(query, KeyUnit::kOffset, work_.query_units * sizeof(float));
                memset(work_.scores + row * kScoreStride, 0, kScoreStride * sizeof(float));
            }
        }
        memset(work_.acc_o, 0, padded_rows_ * work_.value_stride * sizeof(float));
    }

    void load_query_units(int64_t row, float* query) {
        const int64_t units = work_.query_units;
        if constexpr (KeyUnit::kElements == 4) {
            work_.query_scales[row] = quantize_query<Element, KeyUnit>(work_.call, work_.sequence, work_.at(row),
                                                                       work_.head.key_mean, query, units);
        } else {
            load_query<Element>(work_.call, work_.sequence, work_.at(row), query, units * KeyUnit::kElements);
            // Works in place, into the first half: writes never overtake reads.
            if constexpr (KeyUnit::kElements == 2)
                narrow_row(query, reinterpret_cast<Bfloat16*>(query), units * KeyUnit::kElements);
        }
    }

    void accumulate_values() {
        const int64_t columns = work_.value_columns, stride = work_.value_stride;
        const int64_t rows = round_up(work_.rows.count, Unit::kRowStep);
        for (int64_t c = 0; c < columns; c += kPanel)
            for (int64_t i = 0; i < work_.num_runs; ++i) {
                const KeyRun& run = work_.runs[i];
                multiply_panel<true>(Unit{}, work_.scores + run.column / Unit::kElements, kScoreStride,
                                     work_.head.values + run.key / Unit::kElements * stride + c, stride,
                                     padded_keys<Unit>(run.count) / Unit::kElements, work_.acc_o + c, stride, rows,
                                     smaller(kPanel, columns - c));
            }
    }

    void finish() {
        for (int64_t row = 0; row < work_.rows.count; ++row) {
            const float sum = reduce_add(load(work_.row_sum + row * Vec::kWidth));
            store_result<Element>(work_.call, work_.sequence, work_.at(row), work_.acc_o + row * work_.value_stride,
                                  work_.row_max[row], sum);
        }
    }

    TileWork work_;
    const int64_t padded_rows_;
    typename WeightsOf<KeyUnit, Unit>::Type weights_;
};

template <class Element, class KeyUnit, class Unit>
static void prefill_tile(const Call& call, const HeadPanels& head, int64_t tile, float* scratch) {
    PrefillTile<Element, KeyUnit, Unit>(call, head, tile, scratch).run();
}

}  // namespace FA_NAMESPACE
