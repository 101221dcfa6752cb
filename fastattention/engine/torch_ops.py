"""torch.library operators, made from an Operator's declaration for tracing (torch.compile, fake tensors).

`fastattention::<name>` serves a call: its tensors, its scalars, the backend, and for an operator with gradients
`grads`, the names of the tensors whose gradients autograd will ask for. At run time it validates and dispatches as an
eager call does, so a compiled graph is not tied to a backend. `<name>_backward` is the backward of the backend that
served the call, if that has one. Otherwise the forward is computed again on the fallback, which autograd follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fastattention.engine.autograd import backward_scalars, call_backward, gradients, gradients_by_torch, recording
from fastattention.engine.vmap import all_of, map_backward, map_forward

if TYPE_CHECKING:
    from fastattention.engine.operator import AnyOperator, Plan

    AnyPlan = Plan[Any, Any, Any, Any, Any, Any]

_SCHEMA_TYPES = {
    Tensor: "Tensor", Tensor | None: "Tensor?", Tensor | int | None: "Tensor?", bool: "bool", int: "SymInt",
    int | None: "SymInt?", float: "float", float | None: "float?", str: "str", str | None: "str?",
}  # fmt: skip


class Arguments(NamedTuple):
    """The arguments of a call of an operator of torch."""

    given: Any
    options: Any
    backend: str
    grads: str  # names of tensors, separated by spaces


def register(operator: AnyOperator) -> None:
    """Makes the operator of torch of a declaration, with its fake kernel, gradients, vmap rule and FLOP formula."""
    parameters = ", ".join((*_parameters(operator, operator.scalars), "str backend"))
    if operator.gradients is not None:
        parameters += ", str grads=''"
    returns = ", ".join("Tensor" for _ in operator.results)
    forward = torch.library.custom_op(
        f"fastattention::{operator.name}",
        lambda *arguments: _as_returned(_forward(operator, arguments)),
        mutates_args=operator.written,
        schema=f"({parameters}) -> ({returns})",
    )
    forward.register_fake(lambda *arguments: _as_returned(_fake(operator, arguments)))
    register_flop_formula(getattr(torch.ops.fastattention, operator.name), get_raw=True)(
        lambda *arguments, **_: operator.flops(operator.by_name(arguments), backward=False)
    )
    if operator.gradients is not None:
        _register_backward(operator)
        forward.register_autograd(
            lambda ctx, *grads: _differentiate(operator, ctx, grads),
            setup_context=lambda ctx, inputs, output: _save(operator, ctx, inputs, output),
        )
    if hasattr(forward, "register_vmap"):  # from torch 2.5 on; before, vmap calls operators one by one, with a warning
        forward.register_vmap(lambda info, dims, *arguments: map_forward(operator, info, dims, arguments))


def _parameters(operator: AnyOperator, scalars: Sequence[str], grads: Sequence[str] = ()) -> list[str]:
    """Parameters in the language of torch's schemas; grads: results whose gradients come first."""
    tensors, options = get_type_hints(operator.given), get_type_hints(operator.options)
    aliases = {name: f"(a{index}!)" for index, name in enumerate(operator.written)}
    typed = [(name, _SCHEMA_TYPES[tensors[name]]) for name in operator.tensors]
    listed = [f"{type_.replace('Tensor', 'Tensor' + aliases.get(name, ''))} {name}" for name, type_ in typed]
    kept = [f"Tensor? {name}" for name in grads]
    return [
        *(f"Tensor? grad_{name}" for name in grads),
        *listed,
        *kept,
        *(f"{_SCHEMA_TYPES[options[name]]} {name}" for name in scalars),
    ]


def call(operator: AnyOperator, given: Any, options: Any, backend: str) -> Any:
    """Calls the operator of torch."""
    tensors = [getattr(given, name) for name in operator.tensors]
    arguments = [*tensors, *(getattr(options, name) for name in operator.scalars), backend]
    if operator.gradients is not None:
        named = zip(operator.tensors, tensors, strict=True)
        records = torch.is_grad_enabled()
        arguments.append(" ".join(name for name, x in named if records and x is not None and x.requires_grad))
    results = all_of(getattr(torch.ops.fastattention, operator.name)(*arguments))
    asked = {name: _is_asked(operator, options, name) for name in operator.results}
    return operator.output(**{name: x if asked[name] else None for name, x in zip(asked, results, strict=True)})


def _as_returned(results: tuple[Tensor, ...]) -> Any:
    """Results as torch takes them of an operator: a single one stands for itself."""
    return results if len(results) > 1 else results[0]


def _is_asked(operator: AnyOperator, options: Any, result: str) -> bool:
    return result not in operator.asked_by or getattr(options, operator.asked_by[result])


def _read(operator: AnyOperator, named: Mapping[str, Any]) -> Arguments:
    """The arguments of a call. named: all arguments by name; missing scalars get their defaults."""
    given = operator.given(**{name: named[name] for name in operator.tensors})
    options = operator.options(**{name: named[name] for name in operator.scalars if name in named})
    return Arguments(given, options, named["backend"], named.get("grads", ""))


def _forward(operator: AnyOperator, arguments: Sequence[Any]) -> tuple[Tensor, ...]:
    given, options, backend, grads = _read(operator, operator.by_name(arguments))
    if grads:
        plan, inputs = _training_plan(operator, given, options, grads, backend)
        if plan.has_backward:
            return _returned(operator, plan.serve(inputs), given, options, True)
    with torch.no_grad():
        plan, inputs = operator.plan(given, options, backend)
        return _returned(operator, plan.run(inputs), given, options, grads != "")


def _training_plan(operator: AnyOperator, given: Any, options: Any, grads: str, backend: str) -> tuple[AnyPlan, Any]:
    """The plan of a call that will be differentiated, and its tensors as kernels read them, without a graph."""
    wanted = grads.split()
    leaves = {name: x.detach().requires_grad_(name in wanted) for name, x in given._asdict().items() if x is not None}
    with torch.enable_grad():
        plan, inputs = operator.plan(given._replace(**leaves), options, backend)
    with torch.no_grad():
        return plan, plan.as_read(inputs)


def _returned(operator: AnyOperator, output: Any, given: Any, options: Any, differentiated: bool) -> tuple[Tensor, ...]:
    """Results as an operator of torch returns them, tensors only.

    An empty tensor replaces a result that was not asked for. NaN replaces a result that only a backward needs, where
    the backend has none. Shapes must be those of the fake kernel.
    """
    shapes = operator.result_shapes(given, options, differentiated)
    results = []
    for name, (shape, dtype) in shapes.items():
        found = getattr(output, name)
        results.append(given[0].new_full(shape, torch.nan, dtype=dtype) if found is None else found)
    return tuple(results)


def _fake(operator: AnyOperator, arguments: Sequence[Any]) -> tuple[Tensor, ...]:
    given, options, _, grads = _read(operator, operator.by_name(arguments))
    first = given[0]
    if type(first) is Tensor:  # on the meta device nothing runs, so nothing else would check
        operator.prepare(*operator.meta_arguments(given, options))
    shapes = operator.result_shapes(given, options, grads != "")
    return tuple(first.new_empty(shape, dtype=dtype) for shape, dtype in shapes.values())


def _save(operator: AnyOperator, ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    ctx.arguments = _read(operator, operator.by_name(inputs))
    ctx.num_inputs = len(inputs)
    results = output if ctx.arguments.grads else [None] * len(output)
    ctx.save_for_backward(*inputs[: len(operator.tensors)], *results)
    ctx.arguments = ctx.arguments._replace(given=None)
    ctx.set_materialize_grads(False)


def _differentiate(operator: AnyOperator, ctx: Any, given_grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    num_tensors = len(operator.tensors)
    _, options, backend, grads = ctx.arguments
    # The tensor in place of a result that was not asked for has no gradient.
    named = zip(operator.results, given_grads, strict=True)
    found_grads = [grad if _is_asked(operator, options, name) else None for name, grad in named]
    if all(grad is None for grad in found_grads):
        return (None,) * int(ctx.num_inputs)
    saved = ctx.saved_tensors  # read once: checkpointing counts
    tensors, results = saved[:num_tensors], saved[num_tensors:]
    wanted = [name for name, needed in zip(operator.tensors, ctx.needs_input_grad, strict=False) if needed]
    if not set(wanted) <= set(grads.split()):
        # The forward was told of others: a traced graph keeps those of its trace, and torch.vmap hides some. The saved
        # results may lack what the backward of these needs.
        grads, results = " ".join(wanted), (None,) * len(results)
    found = call_backward(operator, found_grads, tensors, results, options, grads, backend)
    return tuple(found.get(name) for name in operator.tensors) + (None,) * (int(ctx.num_inputs) - num_tensors)


def _register_backward(operator: AnyOperator) -> None:
    scalars = backward_scalars(operator)
    results = operator.results
    names = [*(f"grad_{name}" for name in results), *operator.tensors, *results, *scalars, "grads", "backend"]
    parameters = ", ".join((*_parameters(operator, scalars, results), "str grads", "str backend"))

    def named(arguments: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(names, arguments, strict=True))

    def fake(*arguments: Any) -> list[Tensor]:
        by_name = named(arguments)
        wanted = [by_name[name] for name in by_name["grads"].split()]
        return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in wanted]

    backward = torch.library.custom_op(
        f"fastattention::{operator.name}_backward",
        lambda *arguments: _backward(operator, named(arguments)),
        mutates_args=(),
        schema=f"({parameters}) -> Tensor[]",
    )
    backward.register_fake(fake)
    register_flop_formula(getattr(torch.ops.fastattention, f"{operator.name}_backward"), get_raw=True)(
        lambda *arguments, **_: operator.flops(named(arguments), backward=True)
    )
    if hasattr(backward, "register_vmap"):
        backward.register_vmap(lambda info, dims, *arguments: map_backward(operator, info, dims, arguments))


def _backward(operator: AnyOperator, named: Mapping[str, Any]) -> list[Tensor]:
    """Gradients in the order of `grads`. Results are missing if the forward was not told of `grads`."""
    results, names = [named[name] for name in operator.results], named["grads"].split()
    from_gradients = operator.gradients(*(named[f"grad_{name}"] for name in operator.results))  # type: ignore[misc]
    asked = {scalar: named[f"grad_{name}"] is not None for name, scalar in operator.asked_by.items()}
    backend = operator.fallback if results[0] is None else named["backend"]
    given, options, backend, grads = _read(operator, {**named, **asked, "backend": backend})
    plan, inputs = _training_plan(operator, given, options, grads, backend)
    if plan.has_backward:
        output = operator.output(**dict(zip(operator.results, results, strict=True)))
        found = gradients(plan.backend, plan.problem, inputs, output, from_gradients)
    else:
        with recording():
            found = gradients_by_torch(operator, plan.problem, inputs, from_gradients)
    # No operator of torch may return an argument. Kernels may have read a tensor expanded, or in another dtype.
    arguments = {x.untyped_storage()._cdata for x in named.values() if isinstance(x, Tensor)}
    found_as_given = []
    for name in names:
        tensor: Tensor = getattr(given, name)
        grad = found[name].sum_to_size(tensor.shape).to(tensor.dtype)
        found_as_given.append(grad.clone() if grad.untyped_storage()._cdata in arguments else grad)
    return found_as_given
