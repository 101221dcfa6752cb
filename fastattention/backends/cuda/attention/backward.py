"""The gradients of a call by kernels/delta.cuh and kernels/backward.cuh: choice of launches, parameters, calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastattention.attention.problem import AttentionOutput, Inputs, Layout, OutputGradients, Problem
from fastattention.backends.common.c_struct import Params
from fastattention.backends.common.layout import Strides, pointers, strides_of
from fastattention.backends.cuda.attention.backward_heuristics import choose_backward
from fastattention.backends.cuda.attention.call import Launcher
from fastattention.backends.cuda.attention.config import WIDEST_OF_A_WARP, BackwardConfig, DeltaConfig, lanes_for
from fastattention.backends.cuda.attention.heuristics import computed_dtype, has_natural_scores
from fastattention.backends.cuda.attention.launches import attention_template
from fastattention.backends.cuda.attention.params import BackwardParams
from fastattention.backends.cuda.attention.waves import Waves, choose_waves
from fastattention.backends.cuda.common.memory import aligned_as, prepared
from fastattention.engine.bounded import BoundedDict
from fastattention.errors import CompileError
from fastattention.gpu_runtime.chips import Limits
from fastattention.gpu_runtime.module import KernelLaunch


def why_not_widths(problem: Problem, arch: int, limits: Limits) -> str | None:
    """Why the kernels here do not fit the head dimensions, or None."""
    for name, columns in (("headdim", problem.headdim), ("headdim_v", problem.headdim_v)):
        if columns < 1 or (columns > WIDEST_OF_A_WARP and not _fits(problem, arch, limits)):
            return (
                f"{name}={columns}: no kernels for gradients of this call fit the GPU; those from 1 to "
                f"{WIDEST_OF_A_WARP} do; use backend='sdpa'"
            )
    return None


def _fits(problem: Problem, arch: int, limits: Limits) -> bool:
    try:
        choose_backward(problem, arch, limits)
    except CompileError:
        return False
    return True


@dataclass(frozen=True)
class _Pass:
    """One launch of backward.cuh, with the fields of AttentionParams that depend on its rows.

    rounding: the launch after it, where it sums gradients of queries
    """

    config: BackwardConfig
    launch: KernelLaunch
    rounding: KernelLaunch | None
    waves: Waves


@dataclass(frozen=True)
class BackwardLaunches:
    """The kernels that compute gradients of a problem."""

    dtype: torch.dtype  # the dtype in which they read and write
    delta: KernelLaunch
    passes: tuple[_Pass, ...]
    templates: BoundedDict[Strides, bytes]  # parameters by widths and strides of tensors, without addresses


def choose_backward_launches(problem: Problem, arch: int, limits: Limits) -> BackwardLaunches:
    """The launches on a GPU. Raises CompileError when no kernel fits it."""
    dtype = computed_dtype(problem, arch)
    delta = DeltaConfig(dtype, lanes_for(problem.headdim_v))
    passes = []
    for config in choose_backward(problem, arch, limits):
        rows, heads = (
            (problem.seqlen_k, problem.nheads_k) if config.rows_are_keys else (problem.seqlen_q, problem.nheads)
        )
        tokens = problem.seqlen_q * problem.group_size if config.rows_are_keys else problem.seqlen_k
        waves = choose_waves(problem, config, rows, heads, tokens, limits)
        num_ctas = waves.num_m_tiles * heads * problem.batch_size * config.num_value_parts
        rounding = None
        if config.sums_queries:
            warps = problem.batch_size * problem.nheads * -(-problem.seqlen_q // config.step_rows)
            rounding = KernelLaunch(config, 1, -(-warps // config.num_warps))
        passes.append(_Pass(config, KernelLaunch(config, 0, num_ctas), rounding, waves))
    delta_launch = KernelLaunch(delta, 0, -(-math.prod(problem.lse_shape) // delta.rows_of_cta))
    return BackwardLaunches(dtype, delta_launch, tuple(passes), BoundedDict())


def differentiate(
    launches: BackwardLaunches,
    problem: Problem,
    inputs: Inputs,
    result: AttentionOutput,
    grads: OutputGradients,
    launcher: Callable[[KernelLaunch], Launcher],
) -> dict[str, Tensor]:
    """The gradient of every tensor in `problem.grads`."""
    assert result.lse is not None
    grad_out = torch.zeros_like(result.out) if grads.out is None else grads.out
    grad_lse, unit = grads.lse, None
    if launches.dtype is not problem.dtype:
        unit = _unit_of(grad_out, grad_lse, result.lse)
        grad_out, grad_lse = grad_out / unit, None if grad_lse is None else grad_lse / unit
    given = prepared(inputs, launches.dtype)
    out, grad_out = (aligned_as(x, launches.dtype) for x in (result.out, grad_out))
    is_empty = result.out.numel() == 0 or problem.batch_size == 0
    # Kernels skip tokens after the last sequence, whose gradients are zero.
    new = torch.zeros_like if is_empty or problem.layout is Layout.VARLEN else torch.empty_like
    found = {
        name: new(getattr(given, name), memory_format=torch.contiguous_format)
        for name in dict.fromkeys("".join(step.config.gradients for step in launches.passes))
    }
    stats = (torch.zeros if is_empty else torch.empty)(3, *problem.lse_shape, dtype=torch.float32, device=out.device)
    if not is_empty:
        call = AttentionOutput(out, result.lse), OutputGradients(grad_out, grad_lse)
        sums = _query_sums(launches, problem)
        _launch(launches, _params(launches, problem, given, *call, stats, sums, found), launcher)
    final = {name: _final(found[name], getattr(inputs, name), unit) for name in problem.grads if name in found}
    if "sinks" in problem.grads:
        assert inputs.sinks is not None
        # A sink is a key whose value is zero: the gradient of its score is -p delta.
        weights = (inputs.sinks[:, None] - result.lse).exp().masked_fill(result.lse.isneginf(), 0.0)
        by_row = weights * stats[1]
        total = -by_row.sum(-1).reshape(-1, problem.nheads).sum(0)
        final["sinks"] = total if unit is None else total * unit
    return final


def _params(
    launches: BackwardLaunches,
    problem: Problem,
    inputs: Inputs,
    result: AttentionOutput,
    grads: OutputGradients,
    stats: Tensor,
    query_sums: Tensor | None,
    found: dict[str, Tensor],
) -> Params:
    """Parameters that all kernels share, without those of a pass."""
    # Copies may have the strides of another call's tensors, and be wider.
    key = (inputs.q.shape[-1], inputs.v.shape[-1], *strides_of(inputs))
    template = launches.templates.get(key)
    if template is None:
        template = launches.templates[key] = BackwardParams.template(
            call=attention_template(problem, inputs),
            num_rows=stats[0].numel(),
            exponents_of_lse=1.0 if has_natural_scores(problem) else math.log2(math.e),
        )
    tensors = {
        "q": inputs.q, "k": inputs.k, "v": inputs.v, "out": result.out, "lse": result.lse,
        "cu_seqlens_q": inputs.cu_seqlens_q, "cu_seqlens_k": inputs.cu_seqlens_k, "alibi_slopes": inputs.alibi_slopes,
        "sinks": inputs.sinks, "attn_bias": inputs.attn_bias, "dropout_seed": inputs.dropout_seed,
        "block_mask": inputs.block_mask, "tile_index": inputs.tile_index, "tile_bits": inputs.tile_bits,
    }  # fmt: skip
    gradients: dict[str, Tensor | None] = {f"grad_{name}": tensor for name, tensor in found.items()}
    given = {"grad_out": grads.out, "grad_lse": grads.lse, "stats": stats, "query_sums": query_sums}
    params = BackwardParams.make(template, **_addresses(gradients | given))
    call = params.call
    for name, address in _addresses(tensors).items():
        setattr(call, name, address)
    return params


def _query_sums(launches: BackwardLaunches, problem: Problem) -> Tensor | None:
    """Zeros, to which kernels add gradients of queries (kernels/query_sums.cuh)."""
    shape = next((query_sums_shape(problem, step.config) for step in launches.passes if step.rounding), None)
    return None if shape is None else torch.zeros(shape, dtype=torch.float32, device=problem.device)


def query_sums_shape(problem: Problem, config: BackwardConfig) -> tuple[int, int, int]:
    """Rows, heads and columns of the sums to which a kernel adds. Rows of a sequence are a multiple of step_rows."""
    rows = config.step_rows
    if problem.layout is Layout.VARLEN:
        steps = problem.total_q // rows + problem.batch_size
    else:
        steps = problem.batch_size * -(-problem.seqlen_q // rows)
    return steps * rows, problem.nheads, config.headdim


def _addresses(tensors: dict[str, Tensor | None]) -> dict[str, int]:
    return dict(zip(tensors, pointers(*tensors.values()), strict=True))


def _launch(launches: BackwardLaunches, params: Params, launcher: Callable[[KernelLaunch], Launcher]) -> None:
    launcher(launches.delta)(params)
    for step in launches.passes:
        if step.launch.num_ctas:
            params.call.num_m_tiles, params.call.heads_per_l2_wave, params.call.heads_before_last_wave = step.waves
            launcher(step.launch)(params)
        if step.rounding is not None:
            launcher(step.rounding)(params)


def _unit_of(grad_out: Tensor, grad_lse: Tensor | None, lse: Tensor) -> Tensor:
    """A power of two, in whose unit gradients in float16 neither vanish nor overflow; 0-d, on the device.

    The largest gradient given becomes less than 1/16, because gradients of values are sums over many queries.
    """
    largest = _largest(grad_out)
    if grad_lse is not None:
        largest = largest.maximum(_largest(grad_lse.masked_fill(lse.isneginf(), 0.0)))  # rows without keys have none
    exponent = (torch.frexp(largest).exponent + 4).clamp(-126, 127)
    usable = largest.isfinite() & (largest > 0.0)
    return torch.where(usable, torch.ldexp(torch.ones_like(largest), exponent), 1.0)


def _largest(tensor: Tensor) -> Tensor:
    return tensor.abs().amax().float() if tensor.numel() else tensor.new_zeros((), dtype=torch.float32)


def _final(grad: Tensor, tensor: Tensor, unit: Tensor | None) -> Tensor:
    """The gradient in the width and dtype of its tensor, without the unit."""
    grad = grad[..., : tensor.shape[-1]]
    return grad.contiguous() if unit is None else (grad.float() * unit).to(tensor.dtype)
