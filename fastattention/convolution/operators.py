"""The operators of the causal convolution: CONVOLUTION for prompts and training, CONVOLUTION_UPDATE for decoding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.autograd.graph import increment_version

from fastattention.convolution.backend import CONVOLUTION_BACKENDS, ConvolutionBackend, Serve
from fastattention.convolution.problem import (
    NO_BACKWARD,
    ConvolutionGradients,
    ConvolutionInputs,
    ConvolutionOutput,
    ConvolutionProblem,
    UpdateArguments,
)
from fastattention.convolution.validation import ConvolutionOptions, as_backends_read, prepare, prepare_update
from fastattention.engine.checks import is_functionalizing, needs_grad
from fastattention.engine.offsets import recheck_offsets
from fastattention.engine.operator import G, Operator
from fastattention.errors import UnsupportedError

Shapes = dict[str, tuple[Sequence[int], torch.dtype]]


class _ConvolutionOperator(
    Operator[G, ConvolutionOptions, ConvolutionProblem, ConvolutionInputs, ConvolutionOutput, ConvolutionBackend]
):
    """The common base of both operators."""

    registry = CONVOLUTION_BACKENDS
    fallback = "torch"
    options = ConvolutionOptions
    inputs = ConvolutionInputs
    output = ConvolutionOutput

    def as_read(
        self, problem: ConvolutionProblem, inputs: ConvolutionInputs, names: Sequence[str]
    ) -> ConvolutionInputs:
        return as_backends_read(inputs)

    def flops(self, arguments: Mapping[str, Any], backward: bool) -> int:
        """A multiplication and an addition for each weight and output. A backward costs twice that."""
        return int(2 * arguments["x"].numel() * arguments["weight"].shape[1] * (2 if backward else 1))


class Convolution(_ConvolutionOperator[ConvolutionInputs]):
    """Calls that write nothing."""

    name = "causal_conv1d"
    given = ConvolutionInputs
    tensors = ConvolutionInputs._fields
    scalars = ConvolutionOptions._fields
    results = ("out", "final_state")
    asked_by: ClassVar[Mapping[str, str]] = {"final_state": "returns_state"}
    gradients = ConvolutionGradients
    offsets: ClassVar[tuple[str, ...]] = ("cu_seqlens",)

    def prepare(
        self, given: ConvolutionInputs, options: ConvolutionOptions
    ) -> tuple[ConvolutionProblem, ConvolutionInputs]:
        return prepare(given, options)

    def recheck(
        self, problem: ConvolutionProblem
    ) -> Callable[[ConvolutionInputs, ConvolutionOptions], ConvolutionInputs | None] | None:
        return recheck_offsets(problem.seqlen) if problem.varlen else None

    def scalars_of(self, problem: ConvolutionProblem) -> ConvolutionOptions:
        return ConvolutionOptions(problem.silu, problem.returns_state)

    def result_shapes(self, given: ConvolutionInputs, options: ConvolutionOptions, differentiated: bool) -> Shapes:
        x = given.x
        sequences = x.shape[0] if given.cu_seqlens is None else given.cu_seqlens.shape[0] - 1
        state = (sequences, x.shape[2], given.weight.shape[1] - 1) if options.returns_state else (0,)
        return {"out": (x.shape, x.dtype), "final_state": (state, x.dtype)}

    def joined_axes(self, arguments: Mapping[str, Any], mapped: Collection[str]) -> Mapping[str, int]:
        if "weight" in mapped or "bias" in mapped:  # filters of more channels
            return {"x": 2, "weight": 0, "bias": 0, "initial_state": 1, "out": 2, "final_state": 1}
        states = {"initial_state": 0, "final_state": 0}
        if arguments["cu_seqlens"] is not None:  # more sequences in a row
            return {"x": 1, "cu_seqlens": 0, "out": 1, **states}
        return {"x": 0, "out": 0, **states}


class ConvolutionUpdate(_ConvolutionOperator[UpdateArguments]):
    """Calls that write the new inputs to a state, in place. They have no backward."""

    name = "causal_conv1d_update"
    given = UpdateArguments
    tensors = UpdateArguments._fields
    scalars = ("silu",)
    written = ("state",)
    results = ("out",)
    asked_by: ClassVar[Mapping[str, str]] = {}

    def prepare(
        self, given: UpdateArguments, options: ConvolutionOptions
    ) -> tuple[ConvolutionProblem, ConvolutionInputs]:
        return prepare_update(given.inputs(), options)

    def recheck(
        self, problem: ConvolutionProblem
    ) -> Callable[[UpdateArguments, ConvolutionOptions], ConvolutionInputs]:
        return lambda given, _: given.inputs()

    def inputs_of(self, given: UpdateArguments, inputs: ConvolutionInputs) -> ConvolutionInputs:
        return given.inputs()

    def around(self, backend: ConvolutionBackend, problem: ConvolutionProblem, serve: Serve) -> Serve:
        return functools.partial(_serve_counted, serve)

    def names_given(self, problem: ConvolutionProblem, inputs: ConvolutionInputs) -> dict[str, object]:
        return {"state" if name == "initial_state" else name: tensor for name, tensor in inputs._asdict().items()}

    def result_shapes(self, given: UpdateArguments, options: ConvolutionOptions, differentiated: bool) -> Shapes:
        return {"out": (given.x.shape, given.x.dtype)}

    def check_traceable(self, given: UpdateArguments, options: ConvolutionOptions) -> None:
        if needs_grad(*given):
            raise UnsupportedError(NO_BACKWARD)
        if is_functionalizing():
            raise UnsupportedError(
                "torch.func.functionalize does not follow operators that write their states in place"
            )

    def check_mapped(self, arguments: Mapping[str, Any], mapped: Mapping[str, int | None]) -> None:
        if mapped["state"] is None:
            raise UnsupportedError("vmap does not map state, which every index of the mapped axis would write")


def _serve_counted(serve: Serve, inputs: ConvolutionInputs) -> ConvolutionOutput:
    """Tells autograd of writes in place, as torch does of its own: a backward that needs what was there is an error."""
    result = serve(inputs)
    state = inputs.initial_state
    if state is not None and not state.is_inference():
        increment_version([state])
    return result


CONVOLUTION = Convolution()
CONVOLUTION_UPDATE = ConvolutionUpdate()
