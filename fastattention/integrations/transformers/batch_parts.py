"""Splits the arguments of a forward pass along the batch, and concatenates the outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.utils.generic import ModelOutput

from fastattention.errors import ArgumentError, UnsupportedError

# Tensors whose first axis is the batch, or 1 where all sequences share them.
_OF_SEQUENCES = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids")
_OF_ALL = ("cache_position", "logits_to_keep")
_JOINED = ("logits", "last_hidden_state", "hidden_states")


def tokens_of(given: Mapping[str, Any]) -> Tensor:
    """input_ids or inputs_embeds, (batch_size, seqlen, ...). Raises ArgumentError unless there is one of them."""
    tokens = [given[name] for name in ("input_ids", "inputs_embeds") if isinstance(given.get(name), Tensor)]
    if len(tokens) != 1:
        raise ArgumentError(f"give one of input_ids and inputs_embeds, got {len(tokens)}")
    result: Tensor = tokens[0]
    return result


def split(given: Mapping[str, Any], rows: Sequence[int]) -> list[dict[str, Any]]:
    """The arguments of a forward pass for the first rows[0] sequences, the next rows[1], and so on.

    Raises UnsupportedError for unknown arguments, which might belong to sequences.
    """
    parts: list[dict[str, Any]] = [{} for _ in rows]
    for name, value in given.items():
        _check(name, value, sum(rows))
        divided = name in _OF_SEQUENCES and value is not None and value.shape[0] != 1
        values = value.split(list(rows)) if divided else [value] * len(rows)
        for part, each in zip(parts, values, strict=True):
            part[name] = each
    return parts


def _check(name: str, value: object, batch_size: int) -> None:
    if value is None or isinstance(value, bool | int | float | str):
        if name == "output_attentions" and value:
            raise UnsupportedError("output_attentions=True needs attn_implementation='eager' and no micro-batches")
        return
    if name == "labels":
        raise UnsupportedError("labels cannot be given with micro-batches: the loss is of the whole batch")
    if name not in (*_OF_SEQUENCES, *_OF_ALL):
        raise UnsupportedError(
            f"{name} of type {type(value).__name__} cannot be divided into micro-batches; allowed are "
            f"{', '.join((*_OF_SEQUENCES, *_OF_ALL))}; use a FastAttentionCache"
        )
    if not isinstance(value, Tensor):
        raise UnsupportedError(f"{name} of type {type(value).__name__} must be a tensor with micro-batches")
    if name == "position_ids" and value.dim() != 2:
        raise UnsupportedError(f"position_ids of shape {tuple(value.shape)} must have two axes with micro-batches")
    if name in _OF_SEQUENCES and value.shape[0] not in (1, batch_size):
        raise ArgumentError(f"{name} has shape {tuple(value.shape)}; its first axis must be batch_size={batch_size}")


def join(outputs: Sequence[ModelOutput], cache: Cache) -> ModelOutput:
    """Joins outputs of the parts to outputs of the batch, with `cache`. Raises UnsupportedError for unknown outputs."""
    return type(outputs[0])(**{name: _joined(name, outputs, cache) for name in outputs[0]})


def _joined(name: str, outputs: Sequence[ModelOutput], cache: Cache) -> Any:
    values = [output[name] for output in outputs]
    if isinstance(values[0], Cache):
        return cache
    if len(values) == 1:
        return values[0]
    if name not in _JOINED:
        raise UnsupportedError(
            f"the model's output {name!r} cannot be joined from micro-batches; known are {', '.join(_JOINED)}"
        )
    if isinstance(values[0], Tensor):
        return torch.cat(values)
    return tuple(None if layers[0] is None else torch.cat(layers) for layers in zip(*values, strict=True))
