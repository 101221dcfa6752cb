"""A stand-in for the flash_attn package: code that imports it runs on fastattention, when asked to.

    import fastattention.integrations.flash_attn
    fastattention.integrations.flash_attn.install()

    from flash_attn import flash_attn_func                      # fast_attn_func
    from flash_attn.bert_padding import pad_input, unpad_input

The functions are flash-attn's public ones under their own names: fastattention's take the same arguments in the same
order. Importing this module installs nothing. Code that looks for the installed distribution "flash-attn" instead of
importing the module does not find one; Transformers does so for attn_implementation="flash_attention_2". Use
`fastattention.integrations.transformers` there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattention.attention import interface
from fastattention.errors import ArgumentError, FastAttentionError

__version__ = "2.8.3"  # the flash-attn whose functions these are; importers compare it with what they need

INTERFACE = {
    "flash_attn_func": interface.fast_attn_func,
    "flash_attn_qkvpacked_func": interface.fast_attn_qkvpacked_func,
    "flash_attn_kvpacked_func": interface.fast_attn_kvpacked_func,
    "flash_attn_varlen_func": interface.fast_attn_varlen_func,
    "flash_attn_varlen_qkvpacked_func": interface.fast_attn_varlen_qkvpacked_func,
    "flash_attn_varlen_kvpacked_func": interface.fast_attn_varlen_kvpacked_func,
    "flash_attn_with_kvcache": interface.fast_attn_with_kvcache,
}


def install() -> None:
    """Puts modules flash_attn, flash_attn.flash_attn_interface and flash_attn.bert_padding into sys.modules.

    They hide an installed flash-attn from later imports. Installing twice changes nothing.

    Raises FastAttentionError when another flash_attn has been imported: code may already hold its functions.
    """
    present = sys.modules.get("flash_attn")
    if present is not None and present not in _installed:
        raise FastAttentionError(
            f"flash_attn is already imported, from {getattr(present, '__file__', None) or 'an unknown place'}; "
            "call install() before anything imports it, or remove it"
        )
    if present is None:
        _installed[:] = _modules()
        sys.modules.update({module.__name__: module for module in _installed})


def uninstall() -> None:
    """Takes the modules out of sys.modules again; functions already imported from them go on working."""
    for module in _installed:
        if sys.modules.get(module.__name__) is module:
            del sys.modules[module.__name__]
    _installed.clear()


_installed: list[ModuleType] = []


def _modules() -> list[ModuleType]:
    """flash_attn, flash_attn.flash_attn_interface and flash_attn.bert_padding."""
    padding = (index_first_axis, index_put_first_axis, pad_input, unpad_input)
    submodules = {
        "flash_attn_interface": _module("flash_attn.flash_attn_interface", INTERFACE),
        "bert_padding": _module("flash_attn.bert_padding", {function.__name__: function for function in padding}),
    }
    package = _module("flash_attn", {**INTERFACE, **submodules, "__version__": __version__, "__path__": []})
    return [package, *submodules.values()]


def _module(name: str, members: Mapping[str, object]) -> ModuleType:
    module = ModuleType(name, f"{name} as provided by fastattention.")
    # importlib.util.find_spec refuses modules without a spec.
    module.__spec__ = ModuleSpec(name, loader=None, origin="fastattention", is_package="__path__" in members)
    vars(module).update(members)
    return module


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices`, int64 (n,), of input (rows, ...): (n, ...)."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros (first_axis_dim, ...) with values (n, ...) in rows `indices`, int64 (n,)."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the tokens of a padded batch.

    - `hidden_states`: (batch_size, seqlen, ...)
    - `attention_mask`: bool or int (batch_size, seqlen), 1 is a token and 0 is padding
    - `unused_mask`: same shape, 1 is a token that is kept though it is not used; None is none

    Returns the kept tokens (total, ...), their indices into the flattened batch, int64 (total,), cu_seqlens, int32
    (batch_size + 1,), the longest sequence, and the number of used tokens a sequence, int32 (batch_size,).
    """
    if attention_mask.shape != hidden_states.shape[:2]:
        raise ArgumentError(
            f"attention_mask must be (batch_size, seqlen) = {tuple(hidden_states.shape[:2])}, "
            f"got shape {tuple(attention_mask.shape)}"
        )
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    seqlens = kept.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = F.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(seqlens.max()) if len(seqlens) else 0
    unpadded = index_first_axis(hidden_states.flatten(0, 1), indices)
    return unpadded, indices, cu_seqlens, longest, attention_mask.sum(dim=-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of unpad_input: (batch, seqlen, ...) with hidden_states (total, ...) at `indices` and 0 elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).reshape(batch, seqlen, *hidden_states.shape[1:])
