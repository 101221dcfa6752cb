"""The torch backend of the selection: operations of torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattention import environment
from fastattention.attention.selection.backend import SelectionBackend, Serve
from fastattention.attention.selection.problem import SelectionInputs, SelectionOutput, SelectionProblem
from fastattention.backends.common.selection import check_indices, limits_of, no_slots


class TorchSelectionBackend(SelectionBackend):
    """Finds the slots of all indices, and then moves those of keys that a query sees to the front."""

    name = "torch"

    def why_unavailable(self) -> str | None:
        """Never: torch is always there."""
        return None

    def why_not(self, problem: SelectionProblem) -> str | None:
        """Serves everything."""
        return None

    def make_call(self, problem: SelectionProblem, inputs: SelectionInputs) -> Serve:
        """The computation itself; nothing is prepared."""
        return lambda inputs: select(problem, inputs)


def select(problem: SelectionProblem, inputs: SelectionInputs) -> SelectionOutput:
    """The slots of every query."""
    if problem.num_sets == 0 or problem.batch_size == 0:
        return no_slots(problem, inputs)
    limits = limits_of(problem, inputs)
    if problem.device.type == "cpu" or environment.check_numbers():
        check_indices(problem, inputs, limits)
    keys = _keys(problem, inputs.indices)
    seen = (keys >= 0) & (keys < limits.seen[:, None, None])
    slots = _slots(problem, inputs, limits.sequences, torch.where(seen, keys, 0)).view(problem.num_sets, problem.width)
    seen = seen.view(problem.num_sets, problem.width)
    # Keys that are dropped go to a column behind those of each row.
    table = slots.new_zeros((problem.num_sets, problem.width + 1), dtype=torch.int32)
    table.scatter_(1, torch.where(seen, seen.cumsum(1) - 1, problem.width), slots.int())
    return SelectionOutput(table[:, :-1].contiguous(), seen.sum(1, dtype=torch.int32))


def _keys(problem: SelectionProblem, indices: Tensor) -> Tensor:
    """The keys that indices name, int64 (total_q, heads, width). Those of no block are below 0."""
    blocks = indices.long().clamp(-1, problem.most_keys)
    if problem.key_block == 1:
        return blocks
    within = torch.arange(problem.key_block, device=indices.device)
    return torch.where(blocks[..., None] < 0, -1, blocks[..., None] * problem.key_block + within).flatten(2)


def _slots(problem: SelectionProblem, inputs: SelectionInputs, sequences: Tensor, keys: Tensor) -> Tensor:
    if inputs.block_table is not None:
        columns = torch.div(keys, problem.k_seqlen, rounding_mode="floor")
        # A sequence without pages has no keys either.
        pages = torch.nn.functional.pad(inputs.block_table, (0, 1))[sequences[:, None, None], columns]
        tokens = pages * problem.row_step + keys % problem.k_seqlen
    else:
        first = sequences * problem.row_step if inputs.cu_seqlens_k is None else inputs.cu_seqlens_k[sequences]
        tokens = first[:, None, None] + keys
    heads = torch.arange(problem.heads, device=keys.device)[:, None]
    return tokens * problem.token_step + heads * problem.head_step
