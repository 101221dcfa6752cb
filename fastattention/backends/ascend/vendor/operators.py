"""One call of a torch_npu operator of attention or of an indexer: built as data, checked, then run.

The vendor checks little. Without a mask a sparse_mode is ignored and every query sees every key; Shape inference
accepts a mask of another size, or query heads that are no multiple of key heads, and results are wrong. So every call
goes through `run`, which refuses these, and gradients whose tensors are not those of the forward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattention.backends.ascend.mask_tile import MASK_TILE, mask_tile
from fastattention.backends.ascend.vendor.masks import SparseMask, SparseMode
from fastattention.errors import UnsupportedError

TRAINING = "npu_fusion_attention"
INFERENCE = "npu_fused_infer_attention_score"
GRADIENT = "npu_fusion_attention_grad"
INDEXER = "npu_lightning_indexer"
SELECTED = "npu_sparse_flash_attention"
SELECTED_LATENTS, SELECTED_ROPE = 512, 64  # elements of a key that `SELECTED` takes: the value, and the rotated part
STATISTICS = 8  # the training operators repeat the maximum and the sum of a row this many times

# Some versions of torch_npu lack these arguments. The others are as old as the operators.
_NEWER_ARGUMENTS = {
    TRAINING: ("softmax_layout", "sink"),
    INFERENCE: ("key_antiquant_mode",),
    GRADIENT: ("softmax_layout", "sink"),
}


class OperatorCall(NamedTuple):
    """An operator of torch.ops.npu and its arguments, by the names in its schema."""

    operator: str
    arguments: dict[str, Any]


def mask_arguments(mask: SparseMask, device: torch.device, names: tuple[str, str]) -> dict[str, Any]:
    """sparse_mode, its mask tile, and for a band its tokens, under `names` as the operators disagree on them."""
    arguments: dict[str, Any] = {"sparse_mode": int(mask.mode)}
    if mask.mode is not SparseMode.NO_MASK:
        arguments["atten_mask"] = mask_tile(device)
    if mask.mode is SparseMode.BAND:
        arguments |= dict(zip(names, (mask.pre_tokens, mask.next_tokens), strict=True))
    return arguments


def run(call: OperatorCall) -> tuple[Any, ...]:
    """Checks a call, runs it and gives what the operator returns."""
    check(call)
    result: tuple[Any, ...] = getattr(torch.ops.npu, call.operator)(**call.arguments)
    return result


def check(call: OperatorCall) -> None:
    """Raises ValueError for arguments that the vendor would misread. Calls of this package never have them."""
    if call.operator in _CHECKS:
        _CHECKS[call.operator](call.arguments)
        return
    arguments = call.arguments
    mode, mask = arguments.get("sparse_mode", 0), arguments.get("atten_mask")
    if mode not in tuple(SparseMode):
        raise ValueError(f"sparse_mode={mode} is not in use; it must be one of {[int(each) for each in SparseMode]}")
    if mode != SparseMode.NO_MASK:
        if not isinstance(mask, Tensor):
            raise ValueError(f"sparse_mode={mode} needs atten_mask, got {mask}; the operator would attend to all keys")
        if mask.dtype != torch.bool or tuple(mask.shape) != (MASK_TILE, MASK_TILE) or not mask.is_contiguous():
            raise ValueError(f"atten_mask must be the mask tile, got {mask.dtype} of shape {tuple(mask.shape)}")
    heads = arguments["num_heads"] if call.operator == INFERENCE else arguments["head_num"]
    heads_k = _key_heads(call)
    if heads_k < 1 or heads % heads_k:
        raise ValueError(f"{heads} query heads cannot share {heads_k} key heads; they must be a multiple")
    if call.operator == GRADIENT:
        _check_results_of_forward(arguments)


def _check_indexer(arguments: dict[str, Any]) -> None:
    """Shape inference looks at none of this."""
    query, key, mode = arguments["query"], arguments["key"], arguments["sparse_mode"]
    if mode not in (SparseMode.NO_MASK, SparseMode.CAUSAL):
        raise ValueError(f"sparse_mode={mode} is not one that {INDEXER} has; it must be 0 or 3")
    if arguments["layout_key"] not in (arguments["layout_query"], "PA_BSND"):
        raise ValueError(f"keys in {arguments['layout_key']} need queries in it, got {arguments['layout_query']}")
    if key.shape[-2:] != (1, query.shape[-1]) or arguments["weights"].shape != query.shape[:-1]:
        shapes = ", ".join(str(tuple(arguments[name].shape)) for name in ("query", "key", "weights"))
        raise ValueError(f"query, key and weights must agree, with one key head, got {shapes}")


def _check_selected(arguments: dict[str, Any]) -> None:
    """Neither does shape inference look at this. The operator reads values from key, and as many indices as keys."""
    if arguments["value"] is not arguments["key"]:
        raise ValueError(f"value must be the tensor key, which {SELECTED} reads values from")
    modes = {name: arguments[name] for name in ("sparse_mode", "attention_mode", "sparse_block_size")}
    if tuple(modes.values()) != (SparseMode.NO_MASK, 2, 1):
        raise ValueError(f"{modes} are not in use; they must be 0, 2 and 1")
    columns, keys = arguments["sparse_indices"].shape[-1], arguments["key"].shape[0]
    if columns > keys:
        raise ValueError(f"{columns} indices of {keys} keys: {SELECTED} would read the first {keys} only")


_CHECKS = {INDEXER: _check_indexer, SELECTED: _check_selected}


def _check_results_of_forward(arguments: dict[str, Any]) -> None:
    query = arguments["query"]
    *batch, tokens, heads, _ = query.shape
    rows = (*batch, heads, tokens) if arguments["input_layout"] == "BSND" else (tokens, heads)
    wanted = {
        "dy": (query.dtype, tuple(query.shape)),
        "attention_in": (query.dtype, tuple(query.shape)),
        "softmax_max": (torch.float32, (*rows, STATISTICS)),
        "softmax_sum": (torch.float32, (*rows, STATISTICS)),
    }
    for name, (dtype, shape) in wanted.items():
        tensor = arguments[name]
        if tensor.dtype is not dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous {dtype} of shape {shape}, got {tensor.dtype} {tensor.shape}")


def _key_heads(call: OperatorCall) -> int:
    if call.operator == INFERENCE:
        return int(call.arguments["num_key_value_heads"])
    return int(call.arguments["key"].shape[-2])  # (batch, tokens, heads, headdim) or (tokens, heads, headdim)


def check_size(what: str, given: int, limit: int) -> None:
    """Raises UnsupportedError for a size that a Problem does not have, and that the operators cannot count."""
    if given > limit:
        raise UnsupportedError(
            f"{what}: {given}, and the operators of torch_npu take at most {limit}; "
            "use backend='sdpa', or without gradients FASTATTENTION_ASCEND=triton"
        )


def why_unavailable() -> str | None:
    """Why the torch_npu that has been imported cannot be used, or None."""
    for operator, names in _NEWER_ARGUMENTS.items():
        if not hasattr(torch.ops.npu, operator):
            return f"no {operator} is registered; import torch_npu, or install a version that has it"
        known = {argument.name for argument in getattr(torch.ops.npu, operator).default._schema.arguments}
        missing = [name for name in names if name not in known]
        if missing:
            return f"{operator} of this torch_npu has no argument {' or '.join(missing)}; install a newer torch_npu"
    return None
