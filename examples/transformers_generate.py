"""Generate text with a Transformers model, the one in demo_model/.

    pip install '.[transformers]'
    python examples/transformers_generate.py

For another model change MODEL, and use its tokenizer: a token of the demo model is a byte of Python source.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import fastattention.integrations.transformers  # noqa: F401  (registers the name "fast_attention")

MODEL = Path(__file__).parent / "demo_model"
PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"


def generate(attention: str) -> list[int]:
    """The prompt's bytes, and 48 more."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation=attention, dtype=torch.float32)
    tokens = torch.tensor([[0, *PROMPT.encode()]])
    generated = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=48, do_sample=False)
    return generated[0, 1:].tolist()  # type: ignore[no-any-return]


def main() -> None:
    tokens = generate("fast_attention")
    print(bytes(tokens).decode(errors="replace"))
    assert tokens == generate("eager")
    print("The tokens are those of eager attention.")


if __name__ == "__main__":
    main()
