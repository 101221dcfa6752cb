"""Computes gradients of linear attention in chunks by five kernels.

The first two are those of a call: they compute states and updates again. Then one goes from the last chunk to the
first, for gradients of states. Another computes gradients of updates, of all chunks at once: without a delta rule those
of values, with one what the chain needs of outputs. The last one computes all other gradients, of all chunks at once.
Scratch memory is that of a call, and as much again for gradients of states and updates.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.backends.common.c_struct import Params
from fastattention.backends.common.layout import pointers
from fastattention.backends.cuda.common.memory import aligned_as, check_float16_range
from fastattention.backends.cuda.linear.chunk_call import chunk_template, num_ctas, num_slots, padded, scratch_sizes
from fastattention.backends.cuda.linear.chunk_config import ChunkVariant
from fastattention.backends.cuda.linear.chunk_heuristics import GradientKernels, operand_dtype
from fastattention.backends.cuda.linear.params import ChunkParams, GradientParams
from fastattention.gpu_runtime.module import KernelLaunch
from fastattention.linear.problem import LinearGradients, LinearInputs, LinearProblem

Launcher = Callable[[KernelLaunch], Callable[[Params], None]]


class ChunkedGradients:
    """Gradients of a problem in 16 bits."""

    def __init__(self, problem: LinearProblem, arch: int, kernels: GradientKernels, launcher: Launcher) -> None:
        """launcher: gives a function that enqueues a kernel."""
        self._problem, self._dtype, self._launcher = problem, operand_dtype(problem.dtype, arch), launcher
        self._kernels = kernels
        self._num_slots = num_slots(problem, kernels.prepare.chunk)

    def __call__(self, inputs: LinearInputs, grads: LinearGradients) -> Mapping[str, Tensor]:
        """The gradient of every tensor in `problem.grads`, by its name."""
        check_float16_range(self._dtype, "torch", q=inputs.q, k=inputs.k, v=inputs.v)
        q, k, v = (aligned_as(tensor, self._dtype) for tensor in inputs[:3])
        g = aligned_as(inputs.g, inputs.g.dtype) if self._problem.gate_per_key else inputs.g
        inputs = inputs._replace(q=q, k=k, v=v, g=g)
        unit = None if self._dtype is self._problem.dtype else _unit_of(grads)
        dout, dfinal_state = (x if x is None or unit is None else x / unit for x in grads)
        if dout is None:
            dout = v.new_zeros((*self._problem.out_shape[:3], padded(self._problem.headdim_v)))
        found = self._results(inputs)
        self._launch_all(inputs, aligned_as(dout, self._dtype), dfinal_state, found)
        given = {name: self._as_given(name, found[name]) for name in self._problem.grads}
        return given if unit is None else {name: x.mul_(unit) for name, x in given.items()}

    @property
    def _sums_heads(self) -> bool:
        """Whether gradients of queries and keys are floats, which are summed or converted afterwards."""
        return self._problem.group_size > 1 or self._dtype is not self._problem.dtype

    def _results(self, inputs: LinearInputs) -> dict[str, Tensor]:
        """Memory for all gradients, as kernels write them."""
        problem, tokens = self._problem, self._problem.out_shape[:3]
        row = (*tokens, inputs.q.shape[-1]), torch.float32 if self._sums_heads else self._dtype
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "q": row,
            "k": row,
            "v": ((*tokens, padded(problem.headdim_v)), self._dtype),
            "g": ((*tokens, problem.headdim_k) if problem.gate_per_key else tokens, torch.float32),
            "beta": (tokens, torch.float32),
            "initial_state": (problem.state_shape, torch.float32),
        }
        found = {
            name: inputs.q.new_empty(shape, dtype=dtype)
            for name, (shape, dtype) in shapes.items()
            if getattr(inputs, name) is not None
        }
        if inputs.skip is not None:  # slots without a chunk are not written
            found["skip"] = inputs.q.new_zeros((problem.nheads, self._num_slots), dtype=torch.float32)
        return found

    def _as_given(self, name: str, found: Tensor) -> Tensor:
        """A gradient in the shape and dtype of its tensor."""
        problem = self._problem
        if name in ("q", "k", "v"):
            found = found[..., : problem.headdim_v if name == "v" else problem.headdim_k]
        if name in ("q", "k") and problem.group_size > 1:
            found = found.reshape(*found.shape[:2], problem.nheads_k, problem.group_size, -1).sum(3)
        if name == "skip":
            found = found.sum(1)
        dtypes = {"q": problem.dtype, "k": problem.dtype, "v": problem.dtype, "g": problem.gate_dtype}
        dtype = problem.beta_dtype if name == "beta" else dtypes.get(name)
        return found.to(dtype or torch.float32).contiguous()

    def _launch_all(
        self, inputs: LinearInputs, dout: Tensor, dfinal_state: Tensor | None, found: Mapping[str, Tensor]
    ) -> None:
        kernels, delta_rule = self._kernels, self._problem.delta_rule
        memory = self._memory(inputs, dout)
        results = dict(zip(found, pointers(*found.values()), strict=True))
        call = memory.params(inputs)
        self._launch(kernels.prepare, call)
        self._launch(kernels.states, call)
        (dfinal_at,) = pointers(dfinal_state)
        dstates = {
            "states": memory.state_gradients,
            "initial_state": dfinal_at,
            "final_state": results.get("initial_state", 0),
        }
        if delta_rule:
            dupdates = torch.empty_like(dout)
            (dupdates_at,) = pointers(dupdates)
            self._launch(kernels.updates, memory.params(inputs._replace(v=dout), v=memory.dout, out=dupdates_at))
            tensors = inputs._replace(v=dupdates, initial_state=dfinal_state)
            dstates["updates"] = memory.update_gradients
            self._launch(kernels.chain, memory.params(tensors, v=dupdates_at, **dstates))
        else:  # queries and keys change places
            tensors = inputs._replace(q=inputs.k, k=inputs.q, v=dout, initial_state=dfinal_state)
            given = memory.addresses
            dstates |= {"q": given["k"], "k": given["q"], "v": memory.dout}
            dstates |= {"q_scaled": given["k_scaled"], "k_scaled": given["q_scaled"]}
            self._launch(kernels.chain, memory.params(tensors, **dstates))
            self._launch(kernels.updates, memory.params(tensors, **dstates, out=results["v"]))
        template = GradientParams.template(call=bytes(call), sums_heads=self._sums_heads)
        rows = {f"d{name}": address for name, address in results.items() if name != "initial_state"}
        scratch = {"state_gradients": memory.state_gradients, "update_gradients": memory.update_gradients}
        self._launch(kernels.tokens, GradientParams.make(template, **scratch, **rows))

    def _memory(self, inputs: LinearInputs, dout: Tensor) -> _Memory:
        sizes = scratch_sizes(self._problem, self._kernels.prepare)
        sizes["turned_inverse"] = sizes["inverse"]
        sizes["state_gradients"], sizes["update_gradients"] = sizes["states"], sizes["updates"]
        *offsets, total = itertools.accumulate(sizes.values(), initial=0)
        scratch = inputs.q.new_empty(total, dtype=torch.uint8)
        first, dout_at = pointers(scratch, dout)
        addresses = {name: first + offset for name, offset in zip(sizes, offsets, strict=True)}
        dstates, dupdates = addresses.pop("state_gradients"), addresses.pop("update_gradients")
        addresses |= dict(zip(LinearInputs._fields, pointers(*inputs), strict=True))
        return _Memory(self._problem, self._num_slots, scratch, addresses, dout_at, dstates, dupdates)

    def _launch(self, config: ChunkVariant, params: Params) -> None:
        if count := num_ctas(self._problem, config):
            self._launcher(KernelLaunch(config, 0, count))(params)


class _Memory(NamedTuple):
    """Addresses of one call."""

    problem: LinearProblem
    num_slots: int
    scratch: Tensor  # kept until kernels are launched
    addresses: dict[str, int]  # of tensors and scratch, by the fields of ChunkParams
    dout: int
    state_gradients: int
    update_gradients: int

    def params(self, tensors: LinearInputs, **addresses: int) -> Params:
        """The arguments of a kernel. tensors: what has the strides; addresses: those that differ."""
        template = chunk_template(self.problem, self.num_slots, tensors)
        return ChunkParams.make(template, **{**self.addresses, "dout": self.dout, **addresses})


def _unit_of(grads: LinearGradients) -> Tensor | None:
    """A power of two near the largest element of gradients that kernels read in float16, which has few exponents.

    Gradients are linear in these, so kernels get multiples of it. It stays on the device. None without any element.
    """
    sizes = [x.abs().amax().float() for x in grads if x is not None and x.numel()]
    if not sizes:
        return None
    exponent = torch.stack(sizes).amax().log2().floor()
    return torch.where(exponent.isfinite(), exponent, 0.0).exp2()
