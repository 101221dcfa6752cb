"""Turns a problem and its tensors into launches of the Triton kernels: sizes, strides, splits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattention.attention.problem import AttentionOutput, Inputs, Layout, Problem
from fastattention.backends.ascend.chips import Chip
from fastattention.backends.ascend.mask_tile import MASK_TILE, mask_tile
from fastattention.backends.ascend.simulator.workload import decode_splits, padded
from fastattention.backends.ascend.tiling import Tiling, compiler_options
from fastattention.backends.common.results import keyless

MAX_HEADDIM = 256
_MERGED_ELEMENTS = 4096  # elements of a tile of merge_splits: 16 KB of float32, and a Vector unit holds several


class Launch(NamedTuple):
    """One kernel and everything it is launched with."""

    kernel: Any  # a triton.JITFunction
    num_programs: int
    arguments: dict[str, Tensor | int | float | None]  # in the kernel's order; None for what the call does not have
    constants: dict[str, Any]  # arguments that are compiled in
    options: dict[str, Any]  # of Triton-Ascend's compiler


class PreparedLaunches(NamedTuple):
    """Launches of a call, in order, and the results they write."""

    launches: list[Launch]
    output: AttentionOutput


def rows_are_heads(problem: Problem) -> bool:
    """Whether the rows of a tile are the heads that share a key head. They are when each head has one query."""
    return problem.seqlen_q == 1


def choose_num_splits(problem: Problem, tiling: Tiling, chip: Chip) -> int:
    """The number of parts that keys are split into: as asked, or enough for a decode to occupy every AI Core."""
    if problem.num_splits:
        return problem.num_splits
    if not rows_are_heads(problem):
        return 1
    row_blocks = problem.batch_size * problem.nheads_k * -(-problem.group_size // tiling.outer_tile_m)
    return decode_splits(row_blocks, -(-problem.seqlen_k // tiling.outer_tile_n), chip.num_cores)


def prepare(problem: Problem, inputs: Inputs, tiling: Tiling, chip: Chip) -> PreparedLaunches:
    """Launches of the kernels for `problem`, and tensors for their results.

    inputs: q as it is to be multiplied, after rotary embedding; caches with the new tokens appended.
    """
    num_splits = choose_num_splits(problem, tiling, chip)
    q = _with_rows(inputs.q, -2 if rows_are_heads(problem) else -3)
    inputs = inputs._replace(q=q, k=_with_rows(inputs.k, -3), v=_with_rows(inputs.v, -3))
    if inputs.k_scale is not None and inputs.v_scale is not None:
        inputs = inputs._replace(k_scale=_with_rows(inputs.k_scale, -2), v_scale=_with_rows(inputs.v_scale, -2))
    if inputs.block_table is not None and inputs.block_table.shape[1] == 0:
        inputs = inputs._replace(block_table=inputs.block_table.new_zeros(problem.batch_size, 1))  # one is always read
    if 0 in problem.out_shape:
        return PreparedLaunches([], keyless(problem, inputs))
    out = q.new_empty(problem.out_shape)
    lse = q.new_empty(problem.lse_shape, dtype=torch.float32)
    if problem.layout is Layout.VARLEN:  # no tile has the rows after the last sequence
        out.zero_()
        lse.fill_(-torch.inf)
    if num_splits == 1:
        launches = [_forward(problem, inputs, tiling, chip, 1, out, _Strides.of_lse(problem, lse))]
        return PreparedLaunches(launches, AttentionOutput(out, lse if problem.return_lse else None))
    return _prepare_split(problem, inputs, tiling, chip, num_splits, out)


def _with_rows(tensor: Tensor, axis: int) -> Tensor:
    """`tensor`, or a copy if it repeats one row along `axis`: Triton-Ascend divides by the stride between rows."""
    return tensor if tensor.stride(axis) else tensor.clone(memory_format=torch.contiguous_format)


class _Strides(NamedTuple):
    """A tensor as a kernel walks through it, in elements.

    Rows are queries, or heads when rows are heads. The batch stride of variable-length sequences is that of tokens.
    """

    tensor: Tensor
    split: int
    batch: int
    row: int
    head: int

    @classmethod
    def of_queries(cls, problem: Problem, tensor: Tensor, split: int = 0) -> _Strides:
        """Strides of q or out: (batch_size, seqlen_q, nheads, columns) or (total_q, nheads, columns)."""
        *batch, token, head, _ = tensor.stride()
        first = batch[0] if batch else token
        return cls(tensor, split, first, *_row_and_head(problem, token, head))

    @classmethod
    def of_lse(cls, problem: Problem, lse: Tensor) -> _Strides:
        """Strides of lse: (batch_size, nheads, seqlen_q) or (nheads, total_q)."""
        *batch, head, token = lse.stride()
        return cls(lse, 0, batch[0] if batch else token, *_row_and_head(problem, token, head))


def _row_and_head(problem: Problem, token: int, head: int) -> tuple[int, int]:
    return (head, head * problem.group_size) if rows_are_heads(problem) else (token, head)


def _key_strides(tensor: Tensor) -> tuple[int, int, int]:
    """(batch, row, head) of k or v; with pages, the batch stride is that of pages."""
    *batch, row, head, _ = tensor.stride()
    return (batch[0] if batch else row), row, head


def _prepare_split(
    problem: Problem, inputs: Inputs, tiling: Tiling, chip: Chip, num_splits: int, out: Tensor
) -> PreparedLaunches:
    """Partial results in float32, one for each split, and their merge. Rows of both are in the order of out."""
    from fastattention.backends.ascend import kernels

    rows = out.shape[:-1]  # (batch_size, seqlen_q, nheads) or (total_q, nheads)
    partial_out = out.new_empty((num_splits, *out.shape), dtype=torch.float32)
    partial_lse = out.new_empty((num_splits, *rows, 1), dtype=torch.float32)
    if problem.layout is Layout.VARLEN:  # no tile has the rows after the last sequence: all their parts are empty
        partial_out.zero_()
        partial_lse.fill_(-torch.inf)
    lse = out.new_empty(rows, dtype=torch.float32)
    partial_strides = _Strides.of_queries(problem, partial_lse[0], partial_lse.stride(0))._replace(tensor=partial_lse)
    forward = _forward(problem, inputs, tiling, chip, num_splits, partial_out, partial_strides)
    tile_dv = padded(problem.headdim_v)
    tile_m = _MERGED_ELEMENTS // tile_dv
    merge = Launch(
        kernels.merge_splits,
        min(chip.num_cores, -(-rows.numel() // tile_m)),
        {
            "partial_out": partial_out,
            "partial_lse": partial_lse,
            "out": out,
            "lse": lse,
            "num_rows": rows.numel(),
            "num_splits": num_splits,
            "headdim_v": problem.headdim_v,
        },
        {"TILE_M": tile_m, "TILE_DV": tile_dv},
        {},
    )
    # Heads come first in lse: a view now, which `finish` copies once the launches have run.
    return PreparedLaunches(
        [forward, merge], AttentionOutput(out, lse.transpose(-1, -2) if problem.return_lse else None)
    )


def finish(output: AttentionOutput) -> AttentionOutput:
    """The results of launches that have run, contiguous."""
    return output if output.lse is None else output._replace(lse=output.lse.contiguous())


def _forward(
    problem: Problem, inputs: Inputs, tiling: Tiling, chip: Chip, num_splits: int, out: Tensor, lse: _Strides
) -> Launch:
    from fastattention.backends.ascend import kernels

    heads = rows_are_heads(problem)
    sizes = _sizes(problem, tiling, num_splits)
    constants = {
        "TILE_M": tiling.outer_tile_m,
        "TILE_N": tiling.outer_tile_n,
        "TILE_D": padded(problem.headdim),
        "TILE_DV": padded(problem.headdim_v),
        "MASK_SIZE": MASK_TILE,
        "ROWS_ARE_HEADS": heads,
        "HAS_LEFT": problem.window_left != -1 and not heads,
        "HAS_RIGHT": problem.window_right != -1 and not heads,
        "HAS_SOFTCAP": problem.softcap != 0.0,
    }
    tensors = _tensors(problem, inputs, out, lse.tensor)
    arguments = {**tensors, **_stride_arguments(problem, inputs, out, num_splits, lse), **sizes}
    num_programs = min(chip.num_cores, int(sizes["num_items"]))
    return Launch(kernels.attention_forward, num_programs, arguments, constants, compiler_options(tiling, chip))


def _sizes(problem: Problem, tiling: Tiling, num_splits: int) -> dict[str, int | float]:
    heads = rows_are_heads(problem)
    num_rows, nheads = (problem.group_size, problem.nheads_k) if heads else (problem.seqlen_q, problem.nheads)
    num_m_tiles = -(-num_rows // tiling.outer_tile_m)
    # A window as wide as both sequences together hides nothing. Capped to it, positions stay far below 2^31.
    widest = problem.seqlen_q + problem.seqlen_k
    return {
        "num_items": problem.batch_size * nheads * num_m_tiles * num_splits,
        "nheads": nheads,
        "group_size": problem.group_size,
        "num_m_tiles": num_m_tiles,
        "num_splits": num_splits,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "seqlen_new": problem.seqlen_new,
        "page_block_size": problem.page_block_size or 1,
        "headdim": problem.headdim,
        "headdim_v": problem.headdim_v,
        "window_left": min(problem.window_left, widest),
        "window_right": min(problem.window_right, widest),
        "softmax_scale": problem.softmax_scale,
        "softcap": problem.softcap,
    }


def _tensors(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor) -> dict[str, Tensor | int | float | None]:
    # The one query of a sequence sees a run of keys, which needs no mask.
    masked = problem.has_window and not rows_are_heads(problem)
    return {
        "q": inputs.q,
        "k": inputs.k,
        "v": inputs.v,
        "k_scale": inputs.k_scale,
        "v_scale": inputs.v_scale,
        "out": out,
        "lse": lse,
        "mask": mask_tile(problem.device).view(torch.int8) if masked else None,
        "cu_seqlens_q": inputs.cu_seqlens_q,
        "cu_seqlens_k": inputs.cu_seqlens_k,
        "cache_seqlens": inputs.cache_seqlens,
        "cache_leftpad": inputs.cache_leftpad,
        "cache_batch_idx": inputs.cache_batch_idx,
        "block_table": inputs.block_table,
        "alibi_slopes": inputs.alibi_slopes,
        "sinks": inputs.sinks,
    }


def _stride_arguments(
    problem: Problem, inputs: Inputs, out: Tensor, num_splits: int, lse: _Strides
) -> dict[str, Tensor | int | float | None]:
    queries = _Strides.of_queries(problem, inputs.q)
    split, results = (0, out) if num_splits == 1 else (out.stride(0), out[0])
    written = _Strides.of_queries(problem, results, split)
    slopes, table = inputs.alibi_slopes, inputs.block_table
    strides: dict[str, Tensor | int | float | None] = {
        "q_stride_batch": queries.batch,
        "q_stride_row": queries.row,
        "q_stride_head": queries.head,
    }
    keys = {
        "k": _key_strides(inputs.k),
        "v": _key_strides(inputs.v),
        "k_scale": (0, 0, 0) if inputs.k_scale is None else inputs.k_scale.stride(),
        "v_scale": (0, 0, 0) if inputs.v_scale is None else inputs.v_scale.stride(),
    }
    for name, steps in keys.items():
        places = zip(("batch", "row", "head"), steps, strict=True)
        strides |= {f"{name}_stride_{place}": stride for place, stride in places}
    for name, walk in (("out", written), ("lse", lse)):
        strides |= {f"{name}_stride_{place}": getattr(walk, place) for place in ("split", "batch", "row", "head")}
    strides["alibi_stride_batch"] = 0 if slopes is None or slopes.dim() == 1 else slopes.stride(0)
    strides["table_stride_batch"] = 0 if table is None else table.stride(0)
    return strides
