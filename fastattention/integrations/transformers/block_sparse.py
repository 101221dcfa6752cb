"""Block-sparse prefill: a block mask for each attention layer of a prompt, by a pattern; decoding stays dense."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from fastattention.attention.interface import fast_attn_func
from fastattention.attention.validation.block_masks import (
    DEFAULT_BLOCK_SIZE,
    BlockSize,
    check_block_mask,
    read_block_size,
)
from fastattention.attention.validation.common import Options
from fastattention.engine.checks import read_int, spec_of
from fastattention.errors import ArgumentError, UnsupportedError
from fastattention.integrations.transformers.masks import AT_ONCE, DenseMask, Functions, SequenceMask, Window
from fastattention.integrations.transformers.stored import StoredTokens


class PrefillLayer(NamedTuple):
    """One attention layer of a forward pass, of which a pattern makes a block mask.

    - `module`: the attention module
    - `layer_idx`: its number in the model; None where the module has none
    - `q`: (batch_size, seqlen_q, nheads, headdim), after rotary embedding
    - `k`: (batch_size, seqlen_k, nheads_k, headdim), including earlier tokens. A layer with a sliding window
        may have forgotten its first tokens: key 0 is the first that it holds.
    - `causal`, `window_size`: the mask of the layer, which the block mask joins; as in `fast_attn_func`
    - `softmax_scale`: None means headdim ** -0.5
    """

    module: nn.Module
    layer_idx: int | None
    q: Tensor
    k: Tensor
    causal: bool
    window_size: Window
    softmax_scale: float | None


Pattern = Callable[[PrefillLayer], Tensor | None]


class _Active:
    """The arguments of a sparse_prefill that has been entered."""

    def __init__(self, pattern: Pattern, block_size: BlockSize, least_queries: int) -> None:
        """Raises ArgumentError for wrong arguments."""
        if not callable(pattern):
            raise ArgumentError(f"pattern={pattern!r} must be a function from a PrefillLayer to a block mask or None")
        allowed = "an integer of at least 2"
        least = read_int("least_queries", least_queries, allowed)
        if least < 2:
            raise ArgumentError(f"least_queries={least} must be {allowed}: a decode step has one query")
        self.pattern, self.block_size, self.least_queries = pattern, read_block_size(block_size), least
        self.reached = False  # whether a layer has called fast_attention meanwhile

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: Window,
        softcap: float,
        **given: Any,
    ) -> Any:
        """fast_attn_func in a layer, over the blocks that the pattern keeps."""
        layer_idx = getattr(module, "layer_idx", None)
        layer = PrefillLayer(module, layer_idx, q, k, causal, window_size, softmax_scale)
        mask = self.pattern(layer)
        if mask is not None:
            self._check(mask, layer)
            given |= {"block_mask": mask, "block_size": self.block_size}
        return fast_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, **given)

    def _check(self, mask: object, layer: PrefillLayer) -> None:
        """Raises ArgumentError, naming the pattern, for a mask that does not fit the layer."""
        q, options = layer.q, Options(block_m=self.block_size[0], block_n=self.block_size[1])
        seqlens = q.shape[1], layer.k.shape[1]
        try:
            check_block_mask(
                spec_of("block_mask", mask), spec_of("q", q), q.shape[2], q.shape[0], seqlens, options
            )  # fmt: skip
        except ArgumentError as error:
            raise ArgumentError(
                f"pattern returned no block mask for {type(layer.module).__name__} with layer_idx={layer.layer_idx}: "
                f"{error}"
            ) from error


_active: ContextVar[_Active | None] = ContextVar("sparse_prefill", default=None)
# Contexts that are open in any thread. torch.compile cannot read a ContextVar, but compiles again when this changes.
_num_open = 0
_counting = threading.Lock()


@contextlib.contextmanager
def sparse_prefill(
    pattern: Pattern, *, block_size: BlockSize = DEFAULT_BLOCK_SIZE, least_queries: int = 2
) -> Iterator[None]:
    """Within this context models compute the attention of prompts only over the blocks that `pattern` keeps.

        def pattern(layer):
            (_, seqlen_q, nheads, _), seqlen_k = layer.q.shape, layer.k.shape[1]
            return streaming(nheads, seqlen_q, seqlen_k, sink_tokens=128, local_tokens=1024, device=layer.q.device)

        with sparse_prefill(pattern):
            model.generate(**inputs)

    - `pattern`: called with a `PrefillLayer`, once for each attention layer of a forward pass. Returns a block mask as
        `fast_attn_func` takes it, bool (batch_size or 1, nheads or 1, rows, columns); or None: the layer stays dense.
    - `block_size`: (block_m, block_n) of these masks in tokens, or one number for both; multiples of 64
    - `least_queries`: forward passes with fewer tokens stay dense, at least 2. Decode steps have one. Assisted
        generation verifies its drafts in passes of several.

    The block mask joins the layer's own causal mask or sliding window. Chunks of a prompt are prompts: their queries
    are the new tokens, their keys all tokens so far. It holds for the thread, or the asyncio task, that enters it; the
    innermost context rules.

    Within it a layer raises UnsupportedError for what takes no block mask: padding, variable-length sequences, masks
    that are tensors, continuous batching, a FastAttentionCache that holds tokens already, `tile_allreduce`, training
    mode and tracers (torch.compile). Raises ArgumentError for wrong arguments and for what a pattern should not return.
    Warns on exit when no layer called fast_attention meanwhile, as with another attn_implementation.
    """
    outer, active = _active.get(), _Active(pattern, block_size, least_queries)
    token = _active.set(active)
    _count(1)
    try:
        yield
    finally:
        _count(-1)
        _active.reset(token)
        if outer is not None:
            outer.reached |= active.reached
    if not active.reached:
        warnings.warn(
            "nothing called fast_attention within sparse_prefill, so no prompt was sparse; load the model with "
            "attn_implementation='fast_attention', and enter sparse_prefill in the thread that calls the model",
            stacklevel=3,
        )


def prefill_functions(
    functions: Functions,
    module: nn.Module,
    query: Tensor,
    key: Tensor | StoredTokens,
    attention_mask: SequenceMask | Tensor | None,
) -> Functions:
    """The functions that compute a layer under the pattern, given those without. Arguments as in attention.py."""
    if not _num_open:
        return functions
    if torch.compiler.is_compiling():
        if query.shape[2] > 1:
            _refuse_to_be_traced()
        return functions
    active = _active.get()
    if active is None:
        return functions
    active.reached = True
    if query.shape[2] < active.least_queries:
        return functions
    reason = _why_not(functions, module, query, key, attention_mask)
    if reason is not None:
        raise UnsupportedError(f"sparse_prefill cannot serve {type(module).__name__}: {reason}")
    return Functions(functools.partial(active.attend, module), _refuse_sequences, _refuse_sequences)


def refuse_pattern(reason: str) -> None:
    """Raises UnsupportedError within sparse_prefill."""
    if _num_open and _active.get() is not None:
        raise UnsupportedError(f"sparse_prefill cannot serve {reason}")


def _why_not(
    functions: Functions,
    module: nn.Module,
    query: Tensor,
    key: Tensor | StoredTokens,
    mask: SequenceMask | Tensor | None,
) -> str | None:
    """Why a block mask cannot join a layer; None when it can."""
    if functions is not AT_ONCE:
        return "tile_allreduce computes attention by functions without block masks; load the model without it"
    if module.training:
        return "it is in training mode, in which gradient checkpointing computes layers again; call model.eval()"
    if isinstance(key, StoredTokens):
        return (
            "tokens in a FastAttentionCache are read without block masks; give the whole prompt in one pass, or use a "
            "DynamicCache"
        )
    if isinstance(mask, Tensor):
        return f"its mask is a tensor of shape {tuple(mask.shape)}, not a causal mask, a window or none"
    if mask is None:
        return None
    if not isinstance(mask, DenseMask):
        return f"the batch has padding or variable lengths ({type(mask).__name__}); give prompts of one length, or one"
    given = (query.shape[0], 1, query.shape[2], key.shape[2])
    return (
        None if mask.shape == given else f"its mask is for {mask.shape} and broadcasts to {given}; give one that fits"
    )


def _refuse_sequences(*_: Any, **__: Any) -> NoReturn:
    """Replaces functions that sequences of one length never call."""
    raise UnsupportedError(
        "sparse_prefill cannot serve variable-length sequences (cu_seq_lens_q); give prompts of one length, or one"
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_to_be_traced() -> None:
    """Raises. It is not traced itself, because torch.compile runs code that raises in a trace again without one."""
    raise UnsupportedError(
        "sparse_prefill cannot serve a prompt that is traced, as by torch.compile: a pattern is called for every one; "
        "call the model as it is"
    )


def _count(entered: int) -> None:
    global _num_open
    with _counting:
        _num_open += entered
