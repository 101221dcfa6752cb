"""Continue a long document within a budget of RAM: the prompt is read in chunks that fit it.

    pip install '.[transformers]'
    python examples/long_document.py [FILE] --budget 1500MiB

The budget is for the whole process. Attention needs no memory for masks or scores: the cache and the activations of a
chunk are all that grows. For another model change MODEL, and use its tokenizer: a token of the demo model is a byte.
"""

from __future__ import annotations

import resource
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch
import typer
from transformers import AutoModelForCausalLM

import fastattention.integrations.transformers  # noqa: F401  registers fast_attention
from fastattention.sizes import read_bytes

MODEL = Path(__file__).parent / "demo_model"
CHUNKS = (4096, 2048, 1024, 512, 256, 128)


def main(file: Path = Path(torch.__file__), budget: str = "1500MiB", new_tokens: int = 48) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation="fast_attention", dtype=torch.float32)
    config = model.config
    longest = config.max_position_embeddings - new_tokens
    tokens = torch.tensor([[0, *file.read_bytes()[-longest + 1 :]]])

    # Keys and values of all tokens, and what a layer makes of a chunk: a guess that is rather too high.
    of_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    cache = 2 * of_token * (tokens.shape[1] + new_tokens)  # twice: it grows by copying a layer
    of_chunk_token = 4 * (8 * config.hidden_size + 3 * config.intermediate_size + config.vocab_size)
    room = read_bytes("budget", budget) - psutil.Process().memory_info().rss - cache
    chunk = next((size for size in CHUNKS if size * of_chunk_token <= room), None)
    if chunk is None:
        raise SystemExit(f"{budget} are {(CHUNKS[-1] * of_chunk_token - room) / 2**20:.0f} MiB less than this takes")

    out = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new_tokens, do_sample=False,
        prefill_chunk_size=chunk, eos_token_id=None,
    )  # fmt: skip
    print(bytes(out[0, tokens.shape[1] :].tolist()).decode(errors="replace"))
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{tokens.shape[1]} tokens in chunks of {chunk}: {peak / 2**20:.0f} MiB at the peak, {budget} allowed")
    assert peak <= read_bytes("budget", budget)


if __name__ == "__main__":
    typer.run(main)
