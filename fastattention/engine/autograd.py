"""A call as a node of autograd's graph, for backends that have a backward.

The node keeps the tensors and the results of a call. For attention, nothing has the size seqlen_q x seqlen_k.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from fastattention.engine.backend import Backend
from fastattention.engine.eager import autocast_dtype, runs_eagerly

if TYPE_CHECKING:
    from fastattention.engine.operator import AnyOperator

Serve = Callable[[Any], Any]


def differentiable(operator: AnyOperator, backend: Backend[Any, Any, Any], problem: Any, serve: Serve) -> Serve:
    """`serve` as a node of autograd, which asks `backend` for gradients."""

    def run(inputs: Any) -> Any:
        return operator.output(*FastAttention.apply(operator, backend, problem, serve, *inputs))  # type: ignore[no-untyped-call]

    return run


def without_autocast(operator: AnyOperator, problem: Any, serve: Serve) -> Serve:
    """`serve`, made of operations of torch, whose results and gradients autocast does not round to 16 bits."""

    def run(inputs: Any) -> Any:
        if autocast_dtype(problem.device.type) is None:
            return serve(inputs)
        if problem.grads and not problem.in_transform:
            return operator.output(*WithoutAutocast.apply(operator, problem, serve, *inputs))  # type: ignore[no-untyped-call]
        with torch.autocast(problem.device.type, enabled=False):
            return serve(inputs)

    return run


def gradients(
    backend: Backend[Any, Any, Any], problem: Any, inputs: Any, output: Any, grads: Any
) -> Mapping[str, Tensor]:
    """`Backend.backward` for gradients as autograd gives them: one may be missing, with any strides."""
    contiguous = type(grads)(*(None if grad is None else grad.contiguous() for grad in grads))
    return backend.backward(problem, inputs, output, contiguous)


def gradients_by_torch(operator: AnyOperator, problem: Any, inputs: Any, grads: Any) -> dict[str, Tensor]:
    """Gradients by computing the forward again in operations of torch, which autograd follows."""
    given = {name: tensor for name, tensor in inputs._asdict().items() if tensor is not None}
    leaves = {name: tensor.detach().requires_grad_(name in problem.grads) for name, tensor in given.items()}
    inputs = inputs._replace(**leaves)
    with torch.autocast(problem.device.type, enabled=False):
        with torch.enable_grad():
            output = operator.registry.get(operator.fallback).make_call(problem, inputs)(inputs)
        found = _gradients_of(output, [leaves[name] for name in problem.grads], grads)
    return {name: grad.contiguous() for name, grad in zip(problem.grads, found, strict=True)}


def _gradients_of(
    results: Sequence[Tensor | None],
    leaves: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    retain_graph: bool = False,
) -> Any:
    """Gradients of leaves, zeros for unused ones, from the graph that leads to results."""
    given = zip(results, grads, strict=False)
    pairs = [(x, grad) for x, grad in given if x is not None and x.requires_grad and grad is not None]
    return torch.autograd.grad(
        [x for x, _ in pairs],
        leaves,
        [grad for _, grad in pairs],
        retain_graph=retain_graph,
        allow_unused=True,
        materialize_grads=True,
    )


class FastAttention(Function):
    """The node. Profilers and `grad_fn` show its name. It has no second derivative."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        operator: AnyOperator,
        backend: Backend[Any, Any, Any],
        problem: Any,
        serve: Serve,
        *inputs: Tensor | None,
    ) -> Any:
        output = serve(operator.inputs(*inputs))
        ctx.operator, ctx.backend, ctx.problem, ctx.num_inputs = operator, backend, problem, len(inputs)
        results = [getattr(output, name) for name in operator.results]
        ctx.save_for_backward(*inputs, *results)
        ctx.set_materialize_grads(False)
        others = [x for x in output if x is not None and not any(x is result for result in results)]
        ctx.mark_non_differentiable(*others)
        return tuple(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *found_grads: Tensor | None) -> Any:  # noqa: D102
        operator: AnyOperator = ctx.operator
        saved = ctx.saved_tensors  # read once: checkpointing counts
        inputs = operator.inputs(*saved[: ctx.num_inputs])
        results = dict(zip(operator.results, saved[ctx.num_inputs :], strict=True))
        assert operator.gradients is not None
        grads = operator.gradients(*found_grads[: len(results)])
        given = [grad for grad in grads if grad is not None]
        found: Mapping[str, Tensor] = {}
        if given:
            if not runs_eagerly(*given):  # compiled autograd traces
                found = _gradients_by_operator(operator, ctx.backend, ctx.problem, inputs, results, grads)
            elif any(map(torch._C._functorch.is_legacy_batchedtensor, given)):  # with is_grads_batched
                found = gradients_by_torch(operator, ctx.problem, inputs, grads)
            else:
                found = gradients(ctx.backend, ctx.problem, inputs, operator.output(**results), grads)
        return None, None, None, None, *(found.get(name) for name in inputs._fields)


class WithoutAutocast(Function):
    """A node around the graph of a call's operations: its backward runs without autocast. No second derivative."""

    @staticmethod
    def forward(ctx: Any, operator: AnyOperator, problem: Any, serve: Serve, *inputs: Tensor | None) -> Any:  # noqa: D102
        leaves = operator.inputs(*(x if x is None else x.detach().requires_grad_(x.requires_grad) for x in inputs))
        with torch.autocast(problem.device.type, enabled=False), torch.enable_grad():
            output = serve(leaves)
        ctx.device_type, ctx.results = problem.device.type, output
        ctx.leaves = {index: x for index, x in enumerate(leaves) if x is not None and x.requires_grad}
        ctx.set_materialize_grads(False)
        return tuple(x if x is None else x.detach() for x in output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # noqa: D102
        found: Mapping[int, Tensor] = {}
        if any(grad is not None for grad in grads):
            with torch.autocast(ctx.device_type, enabled=False):
                # A caller's retain_graph is not known here, so the graph lives as long as this node.
                values = _gradients_of(ctx.results, list(ctx.leaves.values()), grads, retain_graph=True)
            found = dict(zip(ctx.leaves, values, strict=True))
        return None, None, None, *(found.get(index) for index in range(len(ctx.needs_input_grad) - 3))


def _gradients_by_operator(
    operator: AnyOperator,
    backend: Backend[Any, Any, Any],
    problem: Any,
    inputs: Any,
    results: Mapping[str, Tensor],
    grads: Any,
) -> dict[str, Tensor]:
    """`gradients` through the operator of torch."""
    tensors = [getattr(inputs, name) for name in operator.tensors]
    options = operator.scalars_of(problem)
    names = " ".join(problem.grads)
    return call_backward(operator, grads, tensors, list(results.values()), options, names, backend.name)


def call_backward(
    operator: AnyOperator,
    given_grads: Sequence[Tensor | None],
    tensors: Sequence[Tensor | None],
    results: Sequence[Tensor | None],
    options: Any,
    grads: str,
    backend: str,
) -> dict[str, Tensor]:
    """Gradients of the tensors named in `grads`, by the operator of torch."""
    scalars = [getattr(options, name) for name in backward_scalars(operator)]
    differentiate = getattr(torch.ops.fastattention, f"{operator.name}_backward")
    found = differentiate(*given_grads, *tensors, *results, *scalars, grads, backend)
    return dict(zip(grads.split(), found, strict=True))


def backward_scalars(operator: AnyOperator) -> list[str]:
    """Scalars of the backward: all but those that ask for results, which the given gradients tell."""
    return [name for name in operator.scalars if name not in operator.asked_by.values()]


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Lets autograd record inside an operator, where torch excludes autograd's dispatch keys."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD_KEYS:
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


_AUTOGRAD_KEYS = tuple(
    getattr(torch._C.DispatchKey, name)
    for name in ("ADInplaceOrView", "AutogradFunctionality", "AutogradOther", "AutogradNestedTensor")
)
