"""Gated delta rules of Transformers models (Qwen3-Next, Qwen3.5, OLMo Hybrid; Kimi-Linear) by fastattention.linear.

Modelling modules of Transformers decorate two functions with `use_kernel_func_from_hub_with_fallback`. This decorator
looks for flash-linear-attention, and otherwise keeps the function as it is, in operations of torch. It is wrapped here,
for modules imported later. Modules that exist already are searched for its results.

Its result is a function, or with the package `kernels` a torch.nn.Module, whose forward a kernel from the hub may
replace. Then our function is put into its class, so that such a kernel, which users ask for, still comes first.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.integrations import hub_kernels
from transformers.utils import logging

from fastattention.engine.checks import DTYPES
from fastattention.linear import chunk_gated_delta_rule, chunk_kda, recurrent_gated_delta_rule, recurrent_kda
from fastattention.linear.validation import MAX_HEADDIM

Rule = Callable[..., tuple[Tensor, Tensor | None]]

_FACTORY = "use_kernel_func_from_hub_with_fallback"
_log = logging.get_logger(__name__)
_enabled = True


def serve_gated_delta_rule(enabled: bool = True) -> None:
    """Sets whether models of Transformers compute gated delta rules by `fastattention.linear`, from the next call on.

    Kimi delta attention is one, with a gate for every key dimension.

    Importing `fastattention.integrations.transformers` switches it on, for models that exist and for later ones. While
    it is off they run what Transformers chose: flash-linear-attention where it is installed, else operations of torch.

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
            f"Transformers {transformers.__version__} has no {_FACTORY}, so its models with a gated delta rule do not "
            "use fastattention.linear"
        )
        return
    if getattr(factory, "serves_gated_delta_rule", False):
        return

    @functools.wraps(factory)
    def wrapped(func_name: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        decorator = factory(func_name, *args, **kwargs)
        ours = _BY_LAYER_NAME.get(func_name)
        return decorator if ours is None else lambda function: _serving(decorator(function), ours)

    wrapped.serves_gated_delta_rule = True  # type: ignore[attr-defined]
    setattr(hub_kernels, _FACTORY, wrapped)
    setattr(transformers.integrations, _FACTORY, wrapped)


def _wrap_imported() -> None:
    """Wraps functions of modules that were imported before the decorator was wrapped."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for name, ours in _BY_FUNCTION.items():
            if _is_decorated(function := names.get(name)):
                names[name] = _serving(function, ours)


def _is_decorated(function: object) -> bool:
    """Whether the decorator made a function, and not other code under the same name."""
    if isinstance(function, nn.Module):
        return getattr(function, "kernel_layer_name", None) in _BY_LAYER_NAME
    return getattr(function, "__globals__", None) is vars(hub_kernels)


def _serving(original: Any, ours: Rule) -> Any:
    """`original`, replaced by `ours` while that is switched on and can serve the call."""
    if not isinstance(original, nn.Module):
        return _choosing(original, ours)
    layer: Any = type(original)  # each has a class of its own
    if not hasattr(layer.forward, "serves_gated_delta_rule"):
        chosen = _choosing(functools.partial(layer.forward, original), ours)
        forward = functools.wraps(layer.forward)(lambda self, *args, **kwargs: chosen(*args, **kwargs))
        forward.serves_gated_delta_rule = True  # type: ignore[attr-defined]
        layer.forward = forward
    return original


def _choosing(original: Rule, ours: Rule) -> Rule:
    @functools.wraps(original)
    def gated_delta_rule(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        # `original` gets its arguments as they were given: functions of flash-linear-attention have another order.
        # torch 2.11 takes torch.compiler.is_exporting() for true in whatever it compiles, so its flag is read.
        if not _enabled or getattr(torch.compiler, "_is_exporting_flag", False):
            return original(*args, **kwargs)
        reason = _why_not(*args, **kwargs)
        if reason is not None:
            _warn_once(f"fastattention.linear leaves a gated delta rule to the model itself: {reason}")
            return original(*args, **kwargs)
        return ours(*args, **kwargs)

    return gated_delta_rule


def _why_not(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *_: object, **__: object
) -> str | None:
    """Why we cannot serve a call that the function of torch takes, or None."""
    for name, tensor in (("query", query), ("g", g), ("beta", beta)):
        if tensor.dtype not in DTYPES:
            return f"{name} is {tensor.dtype}; allowed are float32, float16 and bfloat16"
    if not query.dtype is key.dtype is value.dtype:
        return f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}; they must have one dtype"
    headdim = max(query.shape[-1], value.shape[-1])
    if headdim > MAX_HEADDIM:
        return f"a head dimension is {headdim}; allowed are 1 to {MAX_HEADDIM}"
    return None


def _in_chunks(rule: Callable[[], Rule]) -> Rule:
    """What replaces a model's function over chunks. Backends choose their chunks themselves.

    rule: gives the function of fastattention.linear, at each call.
    """

    def call(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        return _call(rule(), query, key, value, g, beta, *args, **kwargs)

    return call


def _by_token(rule: Callable[[], Rule]) -> Rule:
    """What replaces a model's function token by token."""
    return lambda *args, **kwargs: _call(rule(), *args, **kwargs)


def _call(
    rule: Rule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """(out, final state), the state in float32 as models keep it. Arguments of other implementations are ignored."""
    if initial_state is not None:
        initial_state = initial_state.to(value.device, torch.float32)
    if cu_seqlens is not None and cu_seqlens.shape[0] > 2 and kwargs.get("seq_idx") is None:
        _warn_once(
            "cu_seq_lens_q without seq_idx: the convolution before a gated delta rule mixes neighbouring sequences; "
            "give seq_idx, too (DataCollatorWithFlattening(return_seq_idx=True)), and install causal-conv1d to read it"
        )
    return rule(
        query,
        key,
        value,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _warn_once(message: str) -> None:
    """Warns once for each message, also while torch.compile traces."""
    _log.warning_once(message)


_chunks, _kda_chunks = _in_chunks(lambda: chunk_gated_delta_rule), _in_chunks(lambda: chunk_kda)
_tokens, _kda_tokens = _by_token(lambda: recurrent_gated_delta_rule), _by_token(lambda: recurrent_kda)
_BY_LAYER_NAME: dict[str, Rule] = {
    "chunk_gated_delta_rule": _chunks,
    "fused_recurrent_gated_delta_rule": _tokens,
    "chunk_kda": _kda_chunks,
    "fused_recurrent_kda": _kda_tokens,
}
_BY_FUNCTION: dict[str, Rule] = {
    "torch_chunk_gated_delta_rule": _chunks,
    "torch_recurrent_gated_delta_rule": _tokens,
    "chunk_kimi_delta_attention": _kda_chunks,
    "recurrent_kimi_delta_attention": _kda_tokens,
}
