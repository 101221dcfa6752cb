"""attention_function: makes the public functions of attention, with the types that they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, ParamSpec, Protocol, cast, overload

from torch import Tensor

from fastattention.engine.operator import Request, serves_requests

Arguments = ParamSpec("Arguments")

# Arguments of torch's attention and of FlashAttention-3 and 4 -> what to give in their place.
FOREIGN_NAMES = {
    "attn_mask": "give attn_bias, which is added to the scores: torch.where(mask, 0.0, -torch.inf) for a bool mask",
    "is_causal": "give causal, which is aligned to the bottom right",
    "enable_gqa": "leave it out: nheads of q may be any multiple of nheads_k",
    "scale": "give softmax_scale",
    "query": "give q, (batch_size, seqlen_q, nheads, headdim): tokens come before heads",
    "key": "give k, (batch_size, seqlen_k, nheads_k, headdim): tokens come before heads",
    "value": "give v, (batch_size, seqlen_k, nheads_k, headdim_v): tokens come before heads",
    "page_table": "give block_table",
    "learnable_sink": "give sinks",
    "qv": "give torch.cat((qv, q), -1) as q and torch.cat((v, k), -1) as k",
    "score_mod": "give attn_bias, which is added to the scores",
    "mask_mod": "give block_mask, or attn_bias with -inf where a key is hidden",
    "pack_gqa": "leave it out: kernels choose for themselves",
    "sm_margin": "leave it out: kernels choose for themselves",
    "scheduler_metadata": "leave it out: kernels choose for themselves",
}


class AttentionFunction(Protocol[Arguments]):
    """A public function as type checkers see it. Flags that are not literal, or positional, are not followed."""

    request: Callable[..., Request]

    # The first three overlap with the last one, whose flags are any bool.
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, *args: Any, return_attn_probs: Literal[True], **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, *args: Any, return_lse: Literal[True], **kwargs: Any
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, *args: Any, return_softmax_lse: Literal[True], **kwargs: Any
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Tensor: ...


def attention_function(read: Callable[Arguments, Any]) -> AttentionFunction[Arguments]:
    """Makes a public function of `read`, which makes a Request of its arguments."""
    return cast("AttentionFunction[Arguments]", serves_requests(read, FOREIGN_NAMES))
