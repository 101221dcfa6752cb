"""Reasons why our kernels do not compute some gradients."""

from __future__ import annotations

from fastattention.attention.problem import Layout, Problem

COMPUTED = ("q", "k", "v", "sinks")
NO_BACKWARD = (
    "fast_attn_with_kvcache has no backward and an argument requires a gradient; call it under torch.no_grad() or "
    "torch.inference_mode(), or use fast_attn_func"
)


def why_not_in_transform(alternative: str) -> str:
    """Why our kernels do not serve a call within torch.func.grad, jvp or forward-mode differentiation."""
    return f"torch.func or forward-mode differentiation follows operations of torch alone; use backend={alternative!r}"


def why_not_backward(problem: Problem, name: str) -> str | None:
    """Why the backend called `name`, which has a backward, cannot differentiate `problem`; None where it can."""
    if not problem.needs_grad:
        return None
    if problem.layout is Layout.KVCACHE:
        return NO_BACKWARD
    if problem.qk_dtype is not None:
        return "gradients are not served with qk_dtype; leave it out, or call under torch.no_grad()"
    if problem.in_transform:
        return why_not_in_transform("sdpa")
    if problem.is_paged:
        return "k and v are pages, whose gradients are not computed; use backend='sdpa' or torch.no_grad()"
    for tensor in problem.grads:
        if tensor not in COMPUTED:
            return f"{tensor} requires a gradient, which {name} does not compute; use backend='sdpa'"
    return None
