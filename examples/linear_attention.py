"""Linear attention in a Transformers model: a small random Qwen3-Next, by fastattention and by operations of torch.

    pip install '.[transformers]'
    python examples/linear_attention.py

Three of its four layers are gated delta rules. With the integration imported, fastattention computes them.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from fastattention.integrations.transformers import serve_linear_attention

PROMPT, NEW = 512, 32  # tokens
CONFIG = Qwen3NextConfig(
    vocab_size=256,
    hidden_size=128,
    num_hidden_layers=4,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    num_experts=4,
    num_experts_per_tok=2,
    eos_token_id=None,
)


def generate(model: Any, tokens: torch.Tensor, new: int) -> tuple[float, torch.Tensor]:
    """Generates `new` tokens: (milliseconds, all tokens)."""
    start = time.perf_counter()
    generated = model.generate(tokens, max_new_tokens=new, do_sample=False, pad_token_id=0)
    return 1e3 * (time.perf_counter() - start), generated


def main() -> None:
    torch.manual_seed(0)
    model: Any = Qwen3NextForCausalLM(CONFIG)
    model.eval()
    tokens = torch.randint(CONFIG.vocab_size, (1, PROMPT))
    results = []
    print(f"{'':13} {f'prompt of {PROMPT} tokens':>21} {'each new token':>15}")
    for name, ours in (("fastattention", True), ("torch", False)):
        serve_linear_attention(ours)
        generate(model, tokens, 2)  # warms up
        (prefill, _), (whole, generated) = generate(model, tokens, 1), generate(model, tokens, 1 + NEW)
        print(f"{name:13} {prefill:18.1f} ms {(whole - prefill) / NEW:12.1f} ms")
        results.append(generated)
    assert torch.equal(*results)
    print("The tokens are those of torch's operations.")


if __name__ == "__main__":
    main()
