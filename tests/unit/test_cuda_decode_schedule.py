"""How a decode divides its work: CTAs fill the GPU, and every key has one CTA, every partial result one slot."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastattention.attention.problem import Layout, Problem
from fastattention.backends.cuda.attention.config import KernelConfig
from fastattention.backends.cuda.attention.decode_heuristics import Split, choose_decode, choose_split, num_rows
from fastattention.gpu_runtime.chips import CHIPS, Limits
from unit.samples import problem_of

from .decode_schedule import DECODE, SequenceSpan, TileStream, tiles_of


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    nheads_k = draw(st.sampled_from([1, 2, 3, 8, 32, 100]))
    batch_size, seqlen_q = draw(st.integers(1, 70)), draw(st.integers(1, 40))
    window_left, window_right = draw(st.sampled_from([(-1, -1), (-1, 0), (0, 0), (300, 0), (17, 5)]))
    headdim = draw(st.sampled_from([32, 64, 128, 256]))
    return problem_of(
        layout=Layout.KVCACHE, batch_size=batch_size, seqlen_q=seqlen_q, headdim=headdim, window_left=window_left,
        seqlen_k=draw(st.sampled_from([0, 1, 16, 100, 1000, 5000])), nheads=nheads_k * draw(st.integers(1, 9)),
        nheads_k=nheads_k, window_right=window_right, num_splits=draw(st.sampled_from([0, 0, 0, 1, 2, 7, 64])),
    )  # fmt: skip


def chosen(problem: Problem, limits: Limits) -> tuple[KernelConfig, Split]:
    config = choose_decode(problem, limits.arch, limits)
    return config, choose_split(problem, config, limits)


@given(problems(), st.sampled_from(list(CHIPS)))
def test_a_split_covers_the_rows_and_says_who_merges(problem: Problem, chip: str) -> None:
    config, split = chosen(problem, CHIPS[chip])
    rows = num_rows(problem)
    assert (split.num_m_tiles - 1) * config.tile_m < rows <= split.num_m_tiles * config.tile_m
    assert split.num_units == problem.nheads_k * split.num_m_tiles
    assert split.partial_rows == min(rows, config.tile_m)
    # CTAs that share the columns of v would need each other's sums.
    in_place = split.num_slots > 0 and split.partial_rows <= 16 and config.num_value_parts == 1
    assert split.merges_in_place == in_place
    assert split.num_counters == (split.num_units if in_place else 0)


@given(problems(), st.sampled_from(list(CHIPS)))
def test_ctas_fill_the_gpu_but_are_no_more_than_there_are_tiles(problem: Problem, chip: str) -> None:
    config, split = chosen(replace(problem, num_splits=0), CHIPS[chip])
    most_tiles = problem.batch_size * max(1, -(-problem.seqlen_k // config.stream_tile))
    resident = config.min_ctas * CHIPS[chip].num_sms
    assert 1 <= split.num_cta_groups <= most_tiles
    assert split.num_cta_groups == 1 or split.num_ctas <= 4 * resident
    waves = -(-split.num_ctas // resident)
    # Four waves that end together leave less than a quarter unused, of which a tenth is given for fewer waves.
    assert split.num_cta_groups == most_tiles or split.num_ctas >= 0.9 * 0.75 * waves * resident


@pytest.mark.parametrize(
    ("nheads_k", "cta_groups", "why"),
    [
        (1, 216, "one wave fills all"),
        (8, 27, "one wave of 216 fills all"),
        (32, 13, "192 of 216 would idle more than 416 of 432"),
        (100, 2, "200 of 216"),
        (120, 5, "one wave would fill 120 of 216; 600 fill 648 in three"),
        (300, 2, "300 would fill 432 in two waves; 600 fill 648 in three"),
    ],
    ids=lambda value: str(value).replace(" ", "-"),
)
def test_groups_of_an_a100(nheads_k: int, cta_groups: int, why: str) -> None:
    problem = replace(DECODE, nheads=nheads_k, nheads_k=nheads_k, seqlen_k=1 << 22)
    config, split = chosen(problem, CHIPS["A100"])
    assert config.min_ctas * CHIPS["A100"].num_sms == 216
    assert split.num_cta_groups == cta_groups, why


@given(problems(), st.sampled_from(list(CHIPS)))
def test_a_call_s_num_splits_is_taken_up_to_its_tiles(problem: Problem, chip: str) -> None:
    config, split = chosen(replace(problem, num_splits=max(problem.num_splits, 1)), CHIPS[chip])
    most_tiles = max(1, -(-problem.seqlen_k // config.stream_tile))
    assert split.num_splits == min(max(problem.num_splits, 1), most_tiles)
    assert split.num_cta_groups == problem.batch_size * split.num_splits


@st.composite
def lines(draw: st.DrawFn) -> tuple[Problem, KernelConfig, TileStream]:
    """A problem with lengths that only the device knows."""
    problem = draw(problems())
    chip = CHIPS[draw(st.sampled_from(list(CHIPS)))]._replace(num_sms=draw(st.sampled_from([1, 3, 20, 132])))
    config, split = chosen(problem, chip)
    full = st.just(problem.seqlen_k)
    keys = draw(
        st.lists(st.integers(0, problem.seqlen_k) | full, min_size=problem.batch_size, max_size=problem.batch_size)
    )
    window = problem.window_left, problem.window_right
    return problem, config, TileStream([tiles_of(length, problem.seqlen_q, window, config) for length in keys], split)


def example_stream(num_cta_groups: int, num_splits: int, *tiles: int) -> tuple[Problem, KernelConfig, TileStream]:
    slots = num_cta_groups * (1 if num_splits else 2)
    split = Split(1, 1, num_cta_groups, num_splits, slots, 1, 1, True)
    config, _ = chosen(DECODE, CHIPS["A100"])
    return replace(DECODE, batch_size=len(tiles)), config, TileStream(list(tiles), split)


@settings(deadline=None)  # the model is slow Python
@given(lines())
@example(example_stream(3, 0, 1, 1, 8, 1, 1))
@example(example_stream(6, 2, 1, 5, 2))
def test_every_tile_of_every_sequence_is_in_one_stretch(made: tuple[Problem, KernelConfig, TileStream]) -> None:
    problem, _, stream = made
    sequence_spans = stream.sequence_spans()
    tiles = [tile for span in sequence_spans for tile in span.tiles]
    assert sorted(tiles) == list(range(stream.ends[-1]))
    assert {span.batch for span in sequence_spans} == set(range(problem.batch_size))
    for batch, found in itertools.groupby(sequence_spans, key=lambda span: span.batch):
        cta_groups = [span.cta_group for span in found]
        assert cta_groups == list(range(cta_groups[0], cta_groups[-1] + 1)) == stream.cta_groups_of(batch)


@settings(deadline=None)  # the model is slow Python
@given(lines())
def test_spans_differ_by_one_tile_at_most(made: tuple[Problem, KernelConfig, TileStream]) -> None:
    problem, _, stream = made
    together = [stream.cta_groups_of(batch) for batch in range(problem.batch_size)]
    for cta_groups in together if stream.split.num_splits else [range(len(stream.spans))]:
        sizes = [len(stream.spans[cta_group]) for cta_group in cta_groups]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)  # the model is slow Python
@given(lines())
@example(example_stream(2, 0, 3, 3, 3))
def test_every_partial_result_has_a_place_of_its_own(made: tuple[Problem, KernelConfig, TileStream]) -> None:
    _, _, stream = made
    partial = [span for span in stream.sequence_spans() if not span.is_whole]
    slots = [span.slot + unit for span in partial for unit in range(stream.split.num_units)]
    assert len(set(slots)) == len(slots)
    assert all(0 <= slot < stream.split.num_slots for slot in slots)


@settings(deadline=None)  # the model is slow Python
@given(lines())
@example(example_stream(2, 0, 3, 3, 3))
def test_who_merges_finds_what_each_group_left(made: tuple[Problem, KernelConfig, TileStream]) -> None:
    """It knows only the groups of a sequence: the first group has its beginning, the others do not."""
    problem, _, stream = made
    cta_groups_of = [stream.cta_groups_of(batch) for batch in range(problem.batch_size)]
    for span in stream.sequence_spans():
        assert span.is_whole == (len(cta_groups_of[span.batch]) == 1)
        if not span.is_whole and stream.split.num_splits == 0:
            is_first = span.cta_group == cta_groups_of[span.batch][0]
            assert span.slot == (2 * span.cta_group + is_first) * stream.split.num_units


def test_the_model_says_what_its_words_say() -> None:
    _, _, stream = example_stream(2, 0, 3, 1, 3)
    assert stream.sequence_spans() == [
        SequenceSpan(0, 0, [0, 1, 2], True, 1),
        SequenceSpan(0, 1, [3], True, 1),
        SequenceSpan(1, 2, [4, 5, 6], True, 3),
    ]
    _, _, stream = example_stream(2, 0, 5, 2)
    assert [span.slot for span in stream.sequence_spans()] == [1, 2, 3]
    _, _, stream = example_stream(4, 2, 1, 5)
    assert stream.spans == [[0], [], [1, 2, 3], [4, 5]]
    assert [span.slot for span in stream.sequence_spans()] == [0, 2, 3]
