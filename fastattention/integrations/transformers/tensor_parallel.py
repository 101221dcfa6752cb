"""Tiling-AllReduce in models under Transformers' tensor parallelism: `tile_allreduce(model)`.

Transformers computes attention, then o_proj, then sums over the ranks. Under the name "fast_attention_tiled" attention
is deferred (DeferredAttention) to o_proj. `tile_allreduce` replaces its forward: it computes attention and product row
block by row block, and sums each block while it computes the next. Importing this module registers the name.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from fastattention.attention.interface import fast_attn_func
from fastattention.distributed.deferred import DeferredAttention, deferred_attn, deferred_attn_with_kvcache
from fastattention.distributed.style import PartitionOf, ProjectionTiling, TiledForward, check_options
from fastattention.errors import UnsupportedError
from fastattention.integrations.transformers.attention import fast_attention_forward
from fastattention.integrations.transformers.mask_function import fast_attention_mask
from fastattention.integrations.transformers.masks import AT_ONCE, Functions, SequenceMask
from fastattention.integrations.transformers.model_source import refuse_tables
from fastattention.integrations.transformers.stored import StoredTokens

NAME = "fast_attention_tiled"


def tile_allreduce(model: PreTrainedModel, *, partition: str | PartitionOf = "auto", transport: str = "auto") -> None:
    """Overlaps the all-reduces that follow attention with attention and o_proj of the next rows.

        model = AutoModelForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(tp_size=4))
        tile_allreduce(model)

    - `partition`: "auto" chooses the blocks; or a function from all rows of a call, batch_size * seqlen_q, to the rows
        of each block
    - `transport`: how blocks are summed, as in `TilingAllReduce`

    The model gets the attention implementation "fast_attention_tiled". It is "fast_attention", except that prompts with
    padding on the left stay dense. Call it on every rank. Prompts are computed in row blocks where that is faster,
    decoding and short prompts as before. Calls that cannot be tiled run as before too, with a NotTiledWarning that says
    why.

    Raises ArgumentError for an unknown partition or transport. Raises UnsupportedError for a model without o_proj in
    its attention, or whose o_proj is not divided by rows.
    """
    check_options(partition, transport)
    found = [(name, linear) for name, linear in _projections(model) if not isinstance(linear.forward, TiledForward)]
    tiled = [(linear, ProjectionTiling(_group(name, linear), partition, transport)) for name, linear in found]
    model.set_attn_implementation(NAME)
    for linear, tiling in tiled:
        linear.forward = _Forward(linear, tiling)  # type: ignore[method-assign, assignment]


class _Forward(TiledForward):
    """The forward of o_proj, outside of Transformers' own wrapper."""

    def __call__(self, x: DeferredAttention | Tensor) -> Tensor:
        """(..., hidden) from the output of the attention module."""
        return super().__call__(self.tiling.settle(x, self.linear))


def _projections(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """The output projections of attention, by name. Raises UnsupportedError when there are none."""
    found = False
    for name, module in model.named_modules():
        linear = getattr(module, "o_proj", None)
        if "Attention" in type(module).__name__ and isinstance(linear, nn.Linear):
            found = True
            yield f"{name}.o_proj", linear
    if not found:
        raise UnsupportedError(
            f"{type(model).__name__} has no attention module with a linear o_proj, the only projection that is tiled"
        )


def _group(name: str, linear: nn.Linear) -> torch.distributed.ProcessGroup:
    """The ranks that hold parts of a projection."""
    weight = linear.weight
    if not isinstance(weight, DTensor) or weight.placements != (Shard(1),):
        held = f"a DTensor placed {weight.placements}" if isinstance(weight, DTensor) else "whole, or no DTensor"
        raise UnsupportedError(
            f"{name} must be divided among the ranks by rows, and by nothing else: its weight is {held}; load the "
            "model with from_pretrained(..., distributed_config=DistributedConfig(tp_size=...))"
        )
    return weight.device_mesh.get_group()


def tiled_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor | StoredTokens,
    value: Tensor | StoredTokens,
    attention_mask: SequenceMask | Tensor | None,
    dropout: float = 0.0,
    **given: Any,
) -> tuple[DeferredAttention | Tensor, None]:
    """fast_attention_forward, whose out (batch_size, seqlen_q, nheads, headdim_v) is deferred to the projection.

    Where that is not possible it is computed, and the projection gets the reason. torch.compile gets a tensor.
    """
    functions = AT_ONCE if torch.compiler.is_compiling() else _DEFERRED
    out: Any = fast_attention_forward(
        module, query, key, value, attention_mask, dropout, functions=functions, **given
    )[0]  # fmt: skip
    if functions is _DEFERRED and isinstance(out, Tensor):
        reason = _why_not_deferred(key, attention_mask, dropout)
        return DeferredAttention(lambda: out, out.shape, reason, (out,)), None
    return out, None


def _why_not_deferred(key: Tensor | StoredTokens, attention_mask: SequenceMask | Tensor | None, dropout: float) -> str:
    if isinstance(key, StoredTokens):
        return "keys and values are in a FastAttentionCache"
    if dropout:
        return f"dropout of {dropout}"
    mask = "" if attention_mask is None else f" ({type(attention_mask).__name__})"
    return f"sequences have variable lengths{mask}, as they are with padding on the right; pad on the left"


def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    **given: Any,
) -> Any:
    if dropout_p:
        return fast_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, **given)
    return deferred_attn(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap, **given
    )  # fmt: skip


_DEFERRED = Functions(dense=_dense, kvcache=deferred_attn_with_kvcache)

AttentionInterface.register(NAME, tiled_attention_forward)
AttentionMaskInterface.register(NAME, functools.partial(fast_attention_mask, packs=False))
refuse_tables(NAME)
