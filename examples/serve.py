"""Many prompts at once on a paged cache that holds a third of them, with the tokens of eager attention.

    python examples/serve.py

Continuous batching of Transformers, on the model in demo_model/. For HTTP, use `fastattention serve MODEL`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

import fastattention
from fastattention.integrations.transformers import batching

PACKAGE = Path(fastattention.__file__).parent
MODEL = Path(__file__).parent / "demo_model"
NEW_TOKENS = 24


def main() -> None:
    """Continue the beginnings of the package's own files: the model's tokens are bytes."""
    prompts = [
        list(path.read_bytes()[: 40 + 90 * number]) for number, path in enumerate(sorted(PACKAGE.glob("*.py"))[:8])
    ]
    generation = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)  # type: ignore[no-untyped-call]
    cache = ContinuousBatchingConfig(page_size=16, num_blocks=sum(map(len, prompts)) // 16 // 3, max_batch_tokens=256)

    batching.enable()
    model = load("fast_attention")
    results = model.generate_batch(prompts, generation_config=generation, continuous_batching_config=cache)
    batched = [result.generated_tokens for result in results.values()]
    for tokens in batched:
        print(repr(bytes(tokens).decode(errors="replace")))

    eager = load("eager")
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    alone = [eager.generate(torch.tensor([one]), **options)[0, len(one) :].tolist() for one in prompts]
    assert batched == alone
    print(f"{len(prompts)} prompts at once: the tokens are those of eager attention, one by one.")


def load(attention: str) -> Any:
    """The model in float32, because 16-bit dtypes round differently in a batch."""
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation=attention, dtype=torch.float32)
    return model.eval()


if __name__ == "__main__":
    main()
