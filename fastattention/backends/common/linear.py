"""What our kernels of linear attention do not serve, on any device."""

from __future__ import annotations

from fastattention.backends.common.gradients import why_not_in_transform
from fastattention.linear.problem import LinearProblem


def why_not_kernels(problem: LinearProblem) -> str | None:
    """Why kernels of ours, which compute no gradients, cannot serve `problem`; None where they can."""
    if problem.grads:
        named = ", ".join(problem.grads)
        return f"gradients of {named} are needed, which backend 'torch' computes; use it or torch.no_grad()"
    return why_not_in_transform("torch") if problem.in_transform else None
