"""torch.library operators of linear attention, so that calls can be traced (torch.compile, fake tensors).

The backward computes the forward again in operations of torch, which autograd follows. Annotations are types, not
strings: torch 2.4 reads schemas from them.
"""

from typing import Any

import torch
from torch import Tensor

from fastattention.attention.autograd import recording
from fastattention.linear.dispatch import linear_signature, plan_linear
from fastattention.linear.problem import LinearInputs, LinearOutput
from fastattention.linear.validation import LinearOptions, prepare

_NUM_TENSORS = len(LinearInputs._fields)


def call_linear_attention(given: LinearInputs, options: LinearOptions, backend: str) -> LinearOutput:
    """The operator `fastattention::linear_attention`."""
    out, state = torch.ops.fastattention.linear_attention(*given, *options, backend)
    return LinearOutput(out, state if options.returns_state else None)


@torch.library.custom_op("fastattention::linear_attention", mutates_args=())
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    delta_rule: bool,
    chunked: bool,
    scale: float | None,
    l2norm: bool,
    returns_state: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """(out, final state); the state is empty unless returns_state."""
    given = LinearInputs(q, k, v, g, beta, initial_state, cu_seqlens)
    options = LinearOptions(delta_rule, chunked, scale, l2norm, returns_state)
    with torch.no_grad():
        plan = plan_linear(linear_signature(given, options, backend), given, options, backend)
        out, state = plan.run(given)
    return out, q.new_empty(0, dtype=torch.float32) if state is None else state


@linear_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    delta_rule: bool,
    chunked: bool,
    scale: float | None,
    l2norm: bool,
    returns_state: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    if type(q) is Tensor:  # on the meta device: nothing will run, and nothing else would check
        given = LinearInputs(q, k, v, g, beta, initial_state, cu_seqlens)
        prepare(given, LinearOptions(delta_rule, chunked, scale, l2norm, returns_state))
    sequences = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = (sequences, v.shape[2], q.shape[3], v.shape[3]) if returns_state else (0,)
    return v.new_empty(v.shape), q.new_empty(state, dtype=torch.float32)


@torch.library.custom_op("fastattention::linear_attention_backward", mutates_args=())
def linear_attention_backward(
    grad_out: Tensor | None,
    grad_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    delta_rule: bool,
    chunked: bool,
    scale: float | None,
    l2norm: bool,
    returns_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, beta and initial_state; empty ones of tensors that there are not."""
    tensors = [q, k, v, g, beta, initial_state]
    options = LinearOptions(delta_rule, chunked, scale, l2norm, returns_state)
    with recording():
        leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
        given = LinearInputs._make([*leaves, cu_seqlens])
        results = plan_linear(linear_signature(given, options, "torch"), given, options, "torch").run(given)
    pairs = [
        (x, grad) for x, grad in zip(results, (grad_out, grad_state), strict=True) if x is not None and grad is not None
    ]
    found = torch.autograd.grad(
        [x for x, _ in pairs], [x for x in leaves if x is not None], [grad for _, grad in pairs],
        allow_unused=True, materialize_grads=True,
    )  # fmt: skip
    remaining = iter(found)
    return tuple(q.new_empty(0) if x is None else next(remaining).contiguous() for x in tensors)  # type: ignore[return-value]


@linear_attention_backward.register_fake
def _(
    grad_out: Tensor | None,
    grad_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    delta_rule: bool,
    chunked: bool,
    scale: float | None,
    l2norm: bool,
    returns_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tensors = (q, k, v, g, beta, initial_state)
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors)  # type: ignore[return-value]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:_NUM_TENSORS])
    ctx.scalars = inputs[_NUM_TENSORS:-1]
    ctx.num_inputs = len(inputs)


def _backward(ctx: Any, grad_out: Tensor | None, grad_state: Tensor | None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    if not ctx.scalars[LinearOptions._fields.index("returns_state")]:
        grad_state = None
    found: list[Tensor | None] = [None] * ctx.num_inputs
    if grad_out is not None or grad_state is not None:
        grads = torch.ops.fastattention.linear_attention_backward(grad_out, grad_state, *tensors, *ctx.scalars)
        for i, grad in enumerate(grads):
            found[i] = None if tensors[i] is None else grad
    return tuple(found)


linear_attention.register_autograd(_backward, setup_context=_setup_context)
