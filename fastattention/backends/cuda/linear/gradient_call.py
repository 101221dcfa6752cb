"""Computes gradients of linear attention in chunks by five kernels.

The first two are those of a call: they compute states and updates again. Then one goes from the last chunk to the
first, for gradients of states. Another computes gradients of updates, of all chunks at once: without a delta rule those
of values, with one what the chain needs of outputs. The last one computes all other gradients, of all chunks at once.
Scratch memory is that of a call, and as much again for gradients of states and updates.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fastattention.backends.common.c_struct import Params
from fastattention.backends.common.layout import pointers
from fastattention.backends.cuda.common.memory import aligned_as, check_float16_range
from fastattention.backends.cuda.linear.chunk_call import chunk_template, num_ctas, num_slots, padded, scratch_sizes
from fastattention.backends.cuda.linear.chunk_heuristics import GradientKernels, operand_dtype
from fastattention.backends.cuda.linear.params import ChunkParams, GradientParams
from fastattention.engine.bounded import BoundedDict
from fastattention.gpu_runtime.module import KernelLaunch
from fastattention.linear.problem import LinearGradients, LinearInputs, LinearProblem

Launcher = Callable[[KernelLaunch], Callable[[Params], None]]

_make_params = ChunkParams.maker(*ChunkParams.pointer_names)
_NO_ADDRESSES = dict.fromkeys(ChunkParams.pointer_names, 0)


def _launch_none(params: Params) -> None:
    """For a kernel without a CTA."""


class ChunkedGradients:
    """Gradients of a problem in 16 bits."""

    def __init__(self, problem: LinearProblem, arch: int, kernels: GradientKernels, launcher: Launcher) -> None:
        """launcher: gives a function that enqueues a kernel."""
        self._problem, self._dtype = problem, operand_dtype(problem.dtype, arch)
        grids = {name: (config, num_ctas(problem, config)) for name, config in kernels._asdict().items()}
        self._launch = {
            name: launcher(KernelLaunch(config, 0, n)) if n else _launch_none for name, (config, n) in grids.items()
        }
        self._num_slots = num_slots(problem, kernels.prepare.chunk)
        sizes = scratch_sizes(problem, kernels.prepare)
        sizes["turned_inverse"] = sizes["inverse"]
        sizes["state_gradients"], sizes["update_gradients"] = sizes["states"], sizes["updates"]
        *offsets, self._scratch_bytes = itertools.accumulate(sizes.values(), initial=0)
        self._offsets = dict(zip(sizes, offsets, strict=True))
        self._templates: BoundedDict[object, bytes] = BoundedDict()  # ChunkParams without addresses, by strides

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
        scratch = inputs.q.new_empty(self._scratch_bytes, dtype=torch.uint8)
        first, dout_at, dfinal_at = pointers(scratch, dout, dfinal_state)
        given = _NO_ADDRESSES | dict(zip(LinearInputs._fields, pointers(*inputs), strict=True)) | {"dout": dout_at}
        given |= {name: first + offset for name, offset in self._offsets.items()}
        dstates, dupdates = given.pop("state_gradients"), given.pop("update_gradients")
        results = dict(zip(found, pointers(*found.values()), strict=True))
        call = self._params(inputs, given)
        self._launch["prepare"](call)
        self._launch["states"](call)
        chain = given | {
            "states": dstates, "initial_state": dfinal_at, "final_state": results.get("initial_state", 0),
        }  # fmt: skip
        if self._problem.delta_rule:
            of_outputs = torch.empty_like(dout)
            (to,) = pointers(of_outputs)
            self._launch["updates"](self._params(inputs._replace(v=dout), given | {"v": dout_at, "out": to}))
            tensors = inputs._replace(v=of_outputs, initial_state=dfinal_state)
            self._launch["chain"](self._params(tensors, chain | {"v": to, "updates": dupdates}))
        else:  # queries and keys change places
            tensors = inputs._replace(q=inputs.k, k=inputs.q, v=dout, initial_state=dfinal_state)
            chain |= {"q": given["k"], "k": given["q"], "v": dout_at}
            chain |= {"q_scaled": given["k_scaled"], "k_scaled": given["q_scaled"]}
            self._launch["chain"](self._params(tensors, chain))
            self._launch["updates"](self._params(tensors, chain | {"out": results["v"]}))
        template = GradientParams.template(call=bytes(call), sums_heads=self._sums_heads)
        rows = {f"d{name}": address for name, address in results.items() if name != "initial_state"}
        params = GradientParams.make(template, state_gradients=dstates, update_gradients=dupdates, **rows)
        self._launch["tokens"](params)

    def _params(self, tensors: LinearInputs, addresses: Mapping[str, int]) -> Params:
        """The arguments of a kernel. tensors: what has the strides; addresses: by the pointers of ChunkParams."""
        strides = tuple([None if x is None else x.stride() for x in tensors])
        template = self._templates.get(strides)
        if template is None:
            template = self._templates[strides] = chunk_template(self._problem, self._num_slots, tensors)
        return _make_params(template, *addresses.values())


def _unit_of(grads: LinearGradients) -> Tensor | None:
    """A power of two near the largest element of gradients that kernels read in float16, which has few exponents.

    Gradients are linear in these, so kernels get multiples of it. It stays on the device. None without any element.
    """
    sizes = [x.abs().amax().float() for x in grads if x is not None and x.numel()]
    if not sizes:
        return None
    exponent = torch.stack(sizes).amax().log2().floor()
    return torch.where(exponent.isfinite(), exponent, 0.0).exp2()
