"""Models that cache latents (MLA): DeepSeek V2 to V3.2, GLM-4.7, Kimi-Linear, LongCat and others.

Their attention modules expand keys and values of all heads from all latents in every forward pass, by `expand_kv`, and
then ask for attention. Here `expand_kv` hands the latents on as they are. The attention function expands them where
that is cheaper, as for prompts. Otherwise queries absorb the projection of keys, and attend to latents as one key head.
A FastAttentionCache keeps latents as they are, and hands them on as StoredTokens, which are never expanded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastattention.engine.checks import needs_grad
from fastattention.engine.eager import autocast_dtype
from fastattention.errors import UnsupportedError
from fastattention.integrations.transformers.model_source import modules_of, once_for_each_class
from fastattention.integrations.transformers.stored import StoredTokens
from fastattention.integrations.transformers.versions import NAME

Expanded = tuple[Tensor, Tensor]  # keys and values of all heads


class Latents:
    """The keys and values of a layer before their expansion. Modules read their shape before they ask for attention."""

    def __init__(
        self, module: Any, kv: Tensor | StoredTokens, rotated: Tensor | StoredTokens, expand: Callable[[], Expanded]
    ) -> None:
        """kv: (batch_size, 1, seqlen_k, rank); rotated: (batch_size, 1, seqlen_k, rope), a part of all heads' keys.

        With StoredTokens both are the same, which hold rows of rank + rope elements.
        """
        self._kv, self._rotated, self.expanded = kv, rotated, expand
        self._headdim_nope, self._headdim_v = module.qk_nope_head_dim, module.v_head_dim
        self._weight: Tensor = module.kv_b_proj.weight  # (nheads * (headdim_nope + headdim_v), rank)
        self.nheads = self._weight.shape[0] // (self._headdim_nope + self._headdim_v)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of expanded keys: (batch_size, nheads, seqlen_k, headdim)."""
        batch_size, _, seqlen_k, width = self._rotated.shape
        rope = width - self.rank if isinstance(self._rotated, StoredTokens) else width
        return batch_size, self.nheads, seqlen_k, self._headdim_nope + rope

    @property
    def are_stored(self) -> bool:
        """Whether a FastAttentionCache holds them."""
        return isinstance(self._kv, StoredTokens)

    @property
    def rank(self) -> int:
        """Elements of a latent that are its value."""
        return self._weight.shape[1]

    def is_expanded_for(self, query: Tensor, topk: int | None) -> bool:
        """Whether expanded keys and values take fewer operations for these queries (or a gradient is wanted).

        Expansion multiplies every token by the projections, and absorption every query. A pair of a query and a key
        then takes headdim + headdim_v products, or 2 rank + rope with latents. Of these, each query reads only the topk
        keys that an indexer has selected for it. That would be slower with keys of all heads.
        """
        if isinstance(self._kv, StoredTokens):
            return False
        if needs_grad(query, self._kv, self._rotated, self._weight) or autocast_dtype(query.device.type) is not None:
            return True
        seqlen_q, (_, _, seqlen_k, headdim), rank = query.shape[2], self.shape, self.rank
        projections = rank * (self._headdim_nope + self._headdim_v)
        pairs = seqlen_q * (seqlen_k - seqlen_q / 2)
        expanded = seqlen_k * projections + pairs * (headdim + self._headdim_v)
        seen = pairs if topk is None else min(pairs, seqlen_q * topk)
        return bool(expanded < seqlen_q * projections + seen * (2 * rank + self._rotated.shape[-1]))

    def absorbed(self, query: Tensor) -> Tensor:
        """Queries (batch_size, nheads, seqlen_q, headdim) with the projection of keys: (..., rank + rope)."""
        query = query.to(self._weight.dtype)  # autocast may give another where latents are stored
        plain, rotated = query[..., : self._headdim_nope], query[..., self._headdim_nope :]
        return torch.cat((plain @ self._projections()[:, : self._headdim_nope], rotated), dim=-1)

    def keys_and_values(self) -> Expanded | tuple[StoredTokens, StoredTokens]:
        """Latents as one key head, (batch_size, 1, seqlen_k, rank + rope), and its first elements as values."""
        if isinstance(self._kv, StoredTokens):
            return self._kv, self._kv
        assert isinstance(self._rotated, Tensor)
        return joined(self._kv, self._rotated)

    def gathered(self, indices: Tensor) -> Tensor:
        """The latents at `indices`, (batch_size, seqlen_q, topk): (..., rank + rope); any for -1."""
        assert isinstance(self._kv, Tensor)
        assert isinstance(self._rotated, Tensor)
        batch_size, _, seqlen_k, _ = self._kv.shape
        first = torch.arange(batch_size, device=indices.device).view(-1, 1, 1) * seqlen_k
        rows = first + indices.clamp(min=0)
        return torch.cat([part.flatten(0, 2)[rows] for part in (self._kv, self._rotated)], dim=-1)

    def projected(self, out: Tensor) -> Tensor:
        """The result of all heads, (batch_size, seqlen_q, nheads, headdim_v), from that over latents."""
        of_values = self._projections()[:, self._headdim_nope :].transpose(1, 2)
        return (out.transpose(1, 2) @ of_values).transpose(1, 2).contiguous()

    def _projections(self) -> Tensor:
        return self._weight.view(self.nheads, -1, self.rank)


def joined(kv: Tensor, rotated: Tensor) -> Expanded:
    """Both parts of latents as keys, and the first of them as values, in the same memory."""
    keys = torch.cat((kv, rotated), dim=-1)
    return keys, keys[..., : kv.shape[-1]]


@once_for_each_class
def serve_latents(config_class: type) -> bool:
    """Makes modules of this configuration's model hand on latents, while their implementation is fast_attention.

    Returns whether the model has such modules.
    """
    modules = modules_of(config_class)
    for module in modules:
        expand_kv = vars(module).get("expand_kv")
        if expand_kv is not None and not hasattr(expand_kv, "hands_on_latents"):
            module.expand_kv = _handing_on(expand_kv)
    return any("expand_kv" in vars(module) for module in modules)


def _handing_on(expand_kv: Callable[..., Expanded]) -> Callable[..., Any]:
    @functools.wraps(expand_kv)
    def handed_on(self: Any, kv_nope: Any, k_rot: Any) -> Any:
        if self.config._attn_implementation != NAME or not _is_plain(self, kv_nope, k_rot):
            if isinstance(kv_nope, StoredTokens):
                raise UnsupportedError(
                    f"{type(self).__name__} cannot absorb its kv_b_proj, which is quantized, adapted, sharded, "
                    "offloaded or not of the dtype of its latents: a FastAttentionCache cannot serve it; use a "
                    "DynamicCache"
                )
            return expand_kv(self, kv_nope, k_rot)
        latents = Latents(self, kv_nope, k_rot, functools.partial(expand_kv, self, kv_nope, k_rot))
        return latents, latents

    handed_on.hands_on_latents = True  # type: ignore[attr-defined]
    return handed_on


def _is_plain(module: Any, kv: Any, rotated: Any) -> bool:
    """Whether the projection is a matrix beside the latents: none that is quantized, adapted, sharded or offloaded."""
    projection, kind = module.kv_b_proj, type(module.kv_b_proj)
    if (
        kind is not nn.Linear
        or projection.bias is not None
        or not (isinstance(kv, Tensor | StoredTokens) and isinstance(rotated, Tensor | StoredTokens))
    ):
        return False
    weight = projection.weight
    return (
        type(weight) is nn.Parameter
        and (weight.dtype, weight.device) == (kv.dtype, kv.device) == (rotated.dtype, rotated.device)
        and weight.shape[0] % (module.qk_nope_head_dim + module.v_head_dim) == 0
        and not (projection._forward_pre_hooks or projection._forward_hooks or hasattr(projection, "_hf_hook"))
    )
