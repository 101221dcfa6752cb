"""Which heads' CTAs start together."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastattention.attention.problem import Problem
from fastattention.backends.cuda.attention.heuristics import choose_config
from fastattention.backends.cuda.attention.waves import Waves, choose_waves, resident_ctas
from fastattention.gpu_runtime.chips import CHIPS, Limits
from unit.samples import problem_of

UNIFORM = {"nheads": 16, "nheads_k": 16, "headdim": 64}  # no heads share keys
A100 = CHIPS["A100"]


def waves_of(problem: Problem, limits: Limits) -> Waves:
    config = choose_config(problem, limits.arch, limits)
    return choose_waves(problem, config, problem.seqlen_q, problem.nheads, problem.seqlen_k, limits)


SHARING: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "short": ({"seqlen_k": 1024}, 48, 16, 0),  # 256 KiB a head, all 16 of them
    "long": ({}, 48, 6, 12),  # 1 MiB a head, 6 MiB: groups of 6, 6 and 4
    "grouped": ({"nheads_k": 4}, 48, 16, 0),  # 4 heads of keys, each of 4 heads of queries
    "batch": ({"batch_size": 3}, 312, 24, 24),  # across sequences: 39 would do, and two equal groups are 24
    "longer than that": ({"seqlen_k": 1 << 20}, 48, 1, 15),  # one head is more than that
    "longer and grouped": ({"seqlen_k": 1 << 20, "nheads_k": 2}, 48, 8, 8),  # its readers still come together
    "no keys": ({"seqlen_k": 0}, 48, 16, 0),
}


@pytest.mark.parametrize(("call", "l2_mib", "heads", "before_last"), SHARING.values(), ids=SHARING)
def test_heads_share_an_eighth_of_the_cache(call: dict[str, Any], l2_mib: int, heads: int, before_last: int) -> None:
    assert waves_of(problem_of(**UNIFORM | call), A100._replace(l2_bytes=l2_mib << 20))[1:] == (heads, before_last)


@given(st.integers(0, 1 << 20), st.sampled_from([1, 2, 4, 16]), st.integers(1, 5), st.sampled_from(list(CHIPS)))
def test_heads_of_a_wave_fit_the_cache_and_are_as_many_as_can(
    seqlen_k: int, nheads_k: int, batch_size: int, chip: str
) -> None:
    problem = problem_of(**UNIFORM | {"seqlen_k": seqlen_k, "nheads_k": nheads_k, "batch_size": batch_size})
    heads, cache_bytes = 16 * batch_size, CHIPS[chip].l2_bytes // 8

    def fits(query_heads: int) -> bool:
        return -(-query_heads // problem.group_size) * seqlen_k * 128 * 2 <= cache_bytes

    _, together, before_last = waves_of(problem, CHIPS[chip])
    assert problem.group_size <= together <= heads
    assert together == problem.group_size or fits(together)
    num_groups = -(-heads // together)
    assert num_groups == 1 or not fits(-(-heads // (num_groups - 1)))  # one group fewer would be too much
    assert before_last == (num_groups - 1) * together


@given(st.integers(1, 1 << 15), st.sampled_from([1, 2, 16]), st.integers(1, 9), st.sampled_from(list(CHIPS)))
def test_the_last_heads_of_a_causal_call_fill_the_gpu_twice(
    seqlen: int, nheads_k: int, batch_size: int, chip: str
) -> None:
    shape = {"seqlen_q": seqlen, "seqlen_k": seqlen, "nheads_k": nheads_k, "batch_size": batch_size}
    problem = problem_of(**UNIFORM | shape | {"window_right": 0})
    config = choose_config(problem, CHIPS[chip].arch, CHIPS[chip])
    num_m_tiles, together, before_last = waves_of(problem, CHIPS[chip])
    tiles_of_last = (16 * batch_size - before_last) * num_m_tiles
    enough = 2 * resident_ctas(config, CHIPS[chip])
    assert before_last % together == 0
    assert before_last == 0 or tiles_of_last >= enough
    assert tiles_of_last - together * num_m_tiles < enough or before_last + together >= 16 * batch_size
