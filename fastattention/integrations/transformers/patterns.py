"""Recognizes the pattern that Transformers' mask functions compute.

Transformers describes a mask by a function of indices, composed of a few of its own. Such a function is recognized only
when every piece is known, by its code object. Any other function gives None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

from fastattention.integrations.transformers.masks import Window


class Pattern(NamedTuple):
    """A mask over positions, before padding."""

    causal: bool
    window: Window  # (-1, 0) when causal without a window
    sequence_ids: Tensor | None = None  # int (batch_size, tokens): tokens see only those of their own id

    @property
    def is_positional(self) -> bool:
        """Whether the position of a query among the keys matters."""
        return self.window != (-1, -1)


CAUSAL = Pattern(causal=True, window=(-1, 0))
BIDIRECTIONAL = Pattern(causal=False, window=(-1, -1))


def recognize(mask_function: Callable[..., Any]) -> Pattern | None:
    """The pattern of a mask function of Transformers, or None for any other function.

    While torch.compile traces, only functions that are not composed are recognized: it cannot look into functions.
    """
    if mask_function is masking_utils.causal_mask_function:
        return CAUSAL
    if mask_function is masking_utils.bidirectional_mask_function:
        return BIDIRECTIONAL
    if torch.compiler.is_compiling() or not _made_by(mask_function, masking_utils.and_masks):
        return None
    parts = _captured(mask_function).get("mask_functions", ())
    if len(parts) != 2:
        return None
    return _recognise_intersection(*parts) or _recognise_intersection(*reversed(parts))


def _recognise_intersection(overlay: Callable[..., Any], base: Callable[..., Any]) -> Pattern | None:
    """The pattern of and_masks(overlay, base)."""
    if _made_by(overlay, masking_utils.packed_sequence_mask_function):
        return _recognise_packed_sequences(overlay, base)
    inner, size = recognize(base), _captured(overlay).get("sliding_window")
    if not isinstance(size, int) or size < 1:
        return None
    if _made_by(overlay, masking_utils.sliding_window_overlay) and inner is CAUSAL:
        return Pattern(causal=True, window=(size - 1, 0))
    if _made_by(overlay, masking_utils.sliding_window_bidirectional_overlay) and inner is BIDIRECTIONAL:
        return Pattern(causal=False, window=(size, size))
    return None


def _recognise_packed_sequences(overlay: Callable[..., Any], base: Callable[..., Any]) -> Pattern | None:
    """The pattern of several sequences in a row. Positions restart in each, so it is the pattern that was remapped."""
    if not _made_by(base, masking_utils.remap_positions_for_packed_sequence):
        return None
    inner, sequence_ids = recognize(_captured(base)["mask_function"]), _captured(overlay).get("packed_sequence_mask")
    if inner is None or inner.sequence_ids is not None or not isinstance(sequence_ids, Tensor):
        return None
    return inner._replace(sequence_ids=sequence_ids)


def _made_by(function: Callable[..., Any], factory: Callable[..., Any]) -> bool:
    """Whether `function` was defined in the body of `factory`."""
    code = getattr(function, "__code__", None)
    return any(constant is code for constant in factory.__code__.co_consts)


def _captured(function: Callable[..., Any]) -> dict[str, Any]:
    """The variables that a function captured where it was defined."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None:
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
