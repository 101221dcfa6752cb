"""`attn_implementation="fast_attention"` for Hugging Face Transformers 5. Importing this module registers it.

    import fastattention.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fast_attention")

Two functions are registered under that name. The mask function (mask_function.py) runs once a forward pass for each
kind of layer: it knows offsets, cache sizes and padding. It returns a mask of masks.py, or a bool tensor for patterns
that these cannot express. The attention function (attention.py) runs once a layer, under this mask. cache.py has
FastAttentionCache, whose layers the attention function reads through stored.py; micro_batches.py has MicroBatchedCache,
a cache of two halves of a batch, and `overlapped`, under which both are computed at once. block_sparse.py has
`sparse_prefill`, under which prompts are attended to over the blocks that a pattern keeps. linear_attention.py serves
the linear layers of models such as Qwen3-Next and Bamba, by the functions of linear_layers.py. latents.py lets models
such as DeepSeek V3 attend to the latents that they cache. model_source.py inspects how the code of models computes
attention. serving/ is the server. versions.py knows what Transformers has renamed, and
warns of versions that are too old.
docs/guides/transformers.md tells users what is covered, and at what cost.
"""

from __future__ import annotations

try:
    from transformers import AttentionInterface, AttentionMaskInterface

    from fastattention.integrations.transformers.attention import fast_attention_forward
    from fastattention.integrations.transformers.block_sparse import PrefillLayer, sparse_prefill
    from fastattention.integrations.transformers.cache import FastAttentionCache
    from fastattention.integrations.transformers.indexers import serve_masks_of_indices
    from fastattention.integrations.transformers.linear_attention import serve_linear_attention
    from fastattention.integrations.transformers.mask_function import fast_attention_mask
    from fastattention.integrations.transformers.micro_batches import MicroBatchedCache, overlapped
    from fastattention.integrations.transformers.model_source import refuse_tables
    from fastattention.integrations.transformers.versions import NAME, warn_of_old_version
except ImportError as error:
    raise ImportError(
        "fastattention.integrations.transformers needs Transformers 5.23 or newer, which cannot be imported here: "
        f"{error}; pip install 'transformers>=5.23' helps if it is missing or too old"
    ) from error

__all__ = [
    "NAME",
    "FastAttentionCache",
    "MicroBatchedCache",
    "PrefillLayer",
    "fast_attention_forward",
    "fast_attention_mask",
    "overlapped",
    "register",
    "serve_linear_attention",
    "sparse_prefill",
]


def register() -> None:
    """Registers "fast_attention" with Transformers. Importing this module does it; calling it again changes nothing."""
    AttentionInterface.register(NAME, fast_attention_forward)
    AttentionMaskInterface.register(NAME, fast_attention_mask)
    refuse_tables(NAME, serve_masks_of_indices)


register()
serve_linear_attention()
warn_of_old_version()
