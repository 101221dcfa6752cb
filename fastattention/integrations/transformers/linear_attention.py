"""Linear layers of Transformers models (Qwen3-Next, Kimi-Linear, Mamba-2 and others) by fastattention.linear.

Modelling modules of Transformers decorate their functions with `use_kernel_func_from_hub_with_fallback`. This decorator
looks for flash-linear-attention and mamba-ssm, and otherwise keeps the function as it is, in operations of torch. It is
wrapped here, for modules imported later. Modules that exist already are searched for its results.

Its result is a function, or with the package `kernels` a torch.nn.Module, whose forward a kernel from the hub may
replace. Then our function is put into its class, so that such a kernel, which users ask for, still comes first.
linear_layers.py has what replaces each function.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers.integrations import hub_kernels
from transformers.utils import logging

from fastattention.integrations.transformers.linear_layers import BY_FUNCTION, BY_LAYER_NAME, Replacement, warn_once

_FACTORY = "use_kernel_func_from_hub_with_fallback"
_log = logging.get_logger(__name__)
_enabled = True


def serve_linear_attention(enabled: bool = True) -> None:
    """Sets whether models of Transformers compute linear layers by `fastattention.linear`, from the next call on.

    These are gated delta rules, Kimi delta attention, which is one with a gate for every key dimension, and Mamba-2.

    Importing `fastattention.integrations.transformers` switches it on, for models that exist and for later ones. While
    it is off they run what Transformers chose: flash-linear-attention or mamba-ssm where these are installed, else
    operations of torch.

    They also run that for calls that `fastattention.linear` refuses, such as float64 and head dimensions above 256,
    with one warning for each reason. So they do under `torch.export`, as with flash-linear-attention. Kernels from the
    hub (`use_kernels=True`) come before ours.
    """
    global _enabled
    _enabled = bool(enabled)
    if _enabled:
        _wrap_decorator()
        _wrap_imported()


def _wrap_decorator() -> None:
    """Wraps the decorator in the package from which modelling modules import it, which resolves names late."""
    factory = getattr(hub_kernels, _FACTORY, None)
    if factory is None:
        _log.warning(
            f"Transformers {transformers.__version__} has no {_FACTORY}, so its models with linear layers do not use "
            "fastattention.linear"
        )
        return
    if getattr(factory, "serves_linear_attention", False):
        return

    @functools.wraps(factory)
    def wrapped(func_name: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        decorator = factory(func_name, *args, **kwargs)

        def decorate(function: Callable[..., Any]) -> Any:
            ours = BY_FUNCTION.get(function.__name__) or BY_LAYER_NAME.get(func_name)
            return decorator(function) if ours is None else _serving(decorator(function), ours)

        return decorate

    wrapped.serves_linear_attention = True  # type: ignore[attr-defined]
    setattr(hub_kernels, _FACTORY, wrapped)
    setattr(transformers.integrations, _FACTORY, wrapped)


def _wrap_imported() -> None:
    """Wraps functions of modules that were imported before the decorator was wrapped."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for name, ours in BY_FUNCTION.items():
            if _is_decorated(function := names.get(name)):
                names[name] = _serving(function, ours)


def _is_decorated(function: object) -> bool:
    """Whether the decorator made a function, and not other code under the same name."""
    if isinstance(function, nn.Module):
        return hasattr(function, "kernel_layer_name")
    return getattr(function, "__globals__", None) is vars(hub_kernels)


def _serving(original: Any, ours: Replacement) -> Any:
    """`original`, replaced by `ours` while that is switched on and can serve the call."""
    if not isinstance(original, nn.Module):
        return _choosing(original, ours)
    layer: Any = type(original)  # each has a class of its own
    if not hasattr(layer.forward, "serves_linear_attention"):
        chosen = _choosing(functools.partial(layer.forward, original), ours)
        forward = functools.wraps(layer.forward)(lambda self, *args, **kwargs: chosen(*args, **kwargs))
        forward.serves_linear_attention = True  # type: ignore[attr-defined]
        layer.forward = forward
    return original


def _choosing(original: Callable[..., Any], ours: Replacement) -> Callable[..., Any]:
    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        # `original` gets its arguments as they were given: functions of flash-linear-attention have another order.
        # torch 2.11 takes torch.compiler.is_exporting() for true in whatever it compiles, so its flag is read.
        if not _enabled or getattr(torch.compiler, "_is_exporting_flag", False):
            return original(*args, **kwargs)
        reason = ours.why_not(*args, **kwargs)
        if reason is not None:
            if kwargs.get("cu_seq_lens_q") is not None:  # which torch's functions ignore
                reason += "; there, neighbouring sequences mix"
            warn_once(f"fastattention.linear leaves {ours.kind} to the model itself: {reason}")
            return original(*args, **kwargs)
        return ours.serve(*args, **kwargs)

    return chosen
