"""Chooses the variant of a kernel for a problem and a GPU. Needs no GPU."""

from __future__ import annotations

from fastattention.backends.cuda.linear.step_config import STEP_COLUMNS, STEP_WARPS, StepConfig
from fastattention.linear.problem import LinearProblem


def choose_step(problem: LinearProblem, num_sms: int) -> StepConfig:
    """The variant that goes token by token.

    A row of 32 columns fills the 128 bytes that a GPU reads best at once. With few states, tiles of 16 columns give
    twice the CTAs, so that fewer multiprocessors are idle.
    """
    narrow, wide = STEP_COLUMNS
    num_warps = next(warps for warps in STEP_WARPS if warps * StepConfig.warp_rows >= problem.headdim_k)
    is_narrow = problem.headdim_v <= narrow or num_ctas(problem, wide) < num_sms
    rule = problem.gate_per_key, problem.delta_rule or not problem.gate_per_key
    return StepConfig(problem.dtype, *rule, narrow if is_narrow else wide, num_warps)


def num_ctas(problem: LinearProblem, columns: int) -> int:
    """CTAs that share out the columns of all states."""
    return problem.num_sequences * problem.nheads * column_tiles(problem, columns)


def column_tiles(problem: LinearProblem, columns: int) -> int:
    """CTAs that share out the columns of one state."""
    return -(-problem.headdim_v // columns)
