"""Generate from a context whose keys and values do not fit the GPU memory given to them. Needs an NVIDIA GPU.

    pip install '.[transformers]'
    python examples/context_budget.py

The budget here is so small that layers of a tiny model move to host memory. For a real model give for example
gpu_memory="16GiB": the GPU memory that the process may take, weights included.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from fastattention.integrations.transformers import FastAttentionCache
from fastattention.integrations.transformers.versions import CACHE_ARGUMENT


def main(torch_device: str, **cache_options: Any) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation="fast_attention")  # type: ignore[no-untyped-call]
    model.to(torch_device)
    tokens = torch.randint(3, 128, (1, 500), device=torch_device)
    options = {"max_new_tokens": 16, "do_sample": False, "prefill_chunk_size": 128}

    def generate(cache: DynamicCache | FastAttentionCache) -> torch.Tensor:
        # CACHE_ARGUMENT is "cache", or "past_key_values" before Transformers 5.24.
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), **{CACHE_ARGUMENT: cache}, **options)
        assert isinstance(out, torch.Tensor)
        return out

    # Bytes of all keys and values: tokens, layers, keys and values, nheads_k, headdim, float32.
    needed = 500 * 6 * 2 * 2 * 32 * 4
    cache = FastAttentionCache(model.config, kv_budget=needed // 2, page_size=64, **cache_options)
    assert torch.equal(generate(cache), generate(DynamicCache(config=model.config)))
    usage = cache.usage
    assert usage.num_layers_cpu > 0
    print(f"{usage.num_layers_gpu} layers on the GPU, {usage.num_layers_cpu} on the CPU ({cache.policy.value})")
    print("The tokens are those of a cache that keeps everything on the GPU.")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("this example needs an NVIDIA GPU; `fastattention plan offload` predicts what one would do")
    main("cuda")
