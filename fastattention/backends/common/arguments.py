"""Arguments that change scores or weights: a backend lists those it serves, and refuses any other by name."""

from __future__ import annotations

from collections.abc import Collection

from fastattention.attention.problem import PAIR_MASK, Problem

# What the kernels for CPUs and for CUDA GPUs serve.
KERNELS_SERVE = frozenset(
    {"alibi_slopes", "attn_bias", "sinks", "block_mask", PAIR_MASK, "qk_dtype", "dropout_p", "softcap"}
)


def why_not_arguments(problem: Problem, name: str, served: Collection[str]) -> str | None:
    """Why the backend called `name`, which serves the arguments `served`, cannot serve `problem`; None where it can."""
    values = {"dropout_p": f"dropout_p={problem.dropout_p}", "softcap": f"softcap={problem.softcap}"}
    refused = [values.get(argument, argument) for argument in problem.score_arguments if argument not in served]
    return f"{name} does not serve {' and '.join(refused)}; leave it out or use another backend" if refused else None
