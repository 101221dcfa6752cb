"""The tokens of a server's step: answers under way go on at half their pace at least, and prompts are read."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from fastattention.integrations.transformers.serving.step_budget import StepBudget

MOST = 2048


def read_beside(answers: int, tokens: int, seconds_of: Callable[[int], float]) -> tuple[list[int], list[float]]:
    """Reads a prompt beside answers. Returns the tokens of each step, and its seconds. seconds_of: of n tokens."""
    budget = StepBudget(MOST)
    for _ in range(3):
        budget.took(answers, 0, seconds_of(0))
    steps, seconds = [], []
    while tokens > 0:
        read = min(tokens, budget.tokens(answers, MOST + 1) - answers)
        steps.append(read)
        seconds.append(seconds_of(read))
        budget.took(answers, read, seconds[-1])
        tokens -= read
    return steps, seconds


def test_without_answers_a_step_is_as_long_as_the_batch_has_room_for() -> None:
    budget = StepBudget(MOST)
    assert budget.tokens(0, 9 * MOST) == MOST
    budget.took(1, 0, 0.02)
    budget.took(1, 64, 0.05)
    assert budget.tokens(0, 9 * MOST) == MOST


def test_prompts_that_fit_a_step_are_read_at_once() -> None:
    budget = StepBudget(MOST)
    budget.took(3, 0, 0.02)
    budget.took(3, 64, 0.05)
    assert budget.tokens(3, MOST) == MOST
    assert budget.tokens(3, MOST + 1) < MOST


@pytest.mark.parametrize("per_token", [1e-5, 1e-4, 1e-3])
def test_a_step_takes_less_than_twice_as_long_as_one_of_answers_alone(per_token: float) -> None:
    """As on a CPU, where a step reads the weights and each token of a prompt adds to that."""
    steps, seconds = read_beside(8, 20_000, lambda n: 0.02 + per_token * n)
    settled = seconds[len(seconds) // 2 : -1]
    assert max(settled) <= 0.031 or set(steps[len(steps) // 2 : -1]) == {16}
    assert min(settled) >= 0.029 or max(steps) == MOST - 8


def test_a_long_fixed_part_does_not_make_chunks_small() -> None:
    """As on a GPU: answers alone are CUDA graphs of 4 ms, any other step takes 15 ms and 5 us a token."""
    steps, _ = read_beside(64, 30_000, lambda n: 0.015 + 5e-6 * n if n else 0.004)
    assert len(steps) < 30
    assert max(steps) > 1400


def test_chunks_grow_with_the_pace_and_never_beyond_twice_the_largest() -> None:
    steps, _ = read_beside(1, 10_000, lambda n: 0.02 + 1e-7 * n)
    assert steps[0] == 64
    assert all(after <= 2 * before for before, after in itertools.pairwise(steps))
    assert max(steps) == MOST - 1


def test_noise_does_not_stop_reading() -> None:
    noise = iter([0.0, 0.03, 0.001, 0.02] * 1000)
    steps, _ = read_beside(4, 3_000, lambda n: 0.02 + 1e-4 * n + next(noise))
    assert min(steps[:-1]) >= 16
