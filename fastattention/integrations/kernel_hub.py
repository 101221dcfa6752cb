"""The functions that a folder of `fastattention export-kernel` exports: flash-attn's, for Transformers to call.

Transformers loads such a folder with the kernels package. It inspects the parameters of the functions there and passes
arguments that it knows by name. Attention sinks go to a parameter `s_aux`, and are silently dropped where there is
none. All other names are flash-attn's, and so are ours.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastattention.attention.interface import fast_attn_func, fast_attn_varlen_func, fast_attn_with_kvcache

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def _with_s_aux(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its parameter `sinks`, float (nheads,) or None, called `s_aux`. Nothing else changes."""

    @functools.wraps(function)
    def renamed(*args: Any, s_aux: Tensor | None = None, **kwargs: Any) -> Any:
        return function(*args, sinks=s_aux, **kwargs)

    signature = inspect.signature(function)
    parameters = [
        parameter.replace(name="s_aux") if name == "sinks" else parameter
        for name, parameter in signature.parameters.items()
    ]
    renamed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return renamed


flash_attn_func = _with_s_aux(fast_attn_func)
flash_attn_varlen_func = _with_s_aux(fast_attn_varlen_func)
flash_attn_with_kvcache = _with_s_aux(fast_attn_with_kvcache)
