"""Continue every prompt of a file, many at once, and write answers as they come. Started again, it goes on.

    pip install '.[transformers]' psutil
    python examples/batch_file.py [PROMPTS ANSWERS]    # text with a prompt a line; JSON with an answer a line

For another model change MODEL, and use its tokenizer: a token of the demo model is a byte.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import typer
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from fastattention.integrations.transformers import batching

MODEL = Path(__file__).parent / "demo_model"
CACHE_TOKENS = 16_384  # of all requests under way; others wait


def main(prompts: Path = Path("prompts.txt"), answers: Path = Path("answers.jsonl"), new_tokens: int = 32) -> None:
    """Without a file of prompts, a small one is written first."""
    if not prompts.exists():
        prompts.write_text("".join(f"def function_{index}(values):\n" for index in range(20)))
    done = {json.loads(line)["line"] for line in answers.read_text().splitlines()} if answers.exists() else set()
    lines = {index: text for index, text in enumerate(prompts.read_text().splitlines()) if index not in done}

    batching.enable()
    model = AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation="fast_attention", dtype=torch.float32)
    generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1)  # type: ignore[no-untyped-call]
    cache = ContinuousBatchingConfig(page_size=16, num_blocks=CACHE_TOKENS // 16, max_batch_tokens=512)
    with (
        answers.open("a") as output,
        model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=cache
        ) as manager,
    ):
        for index, text in lines.items():
            manager.add_request([0, *text.encode()], request_id=str(index))
        for _ in lines:
            result = manager.get_result()
            assert result is not None
            answer = {"line": int(result.request_id), "answer": bytes(result.generated_tokens).decode(errors="replace")}
            print(json.dumps(answer), file=output, flush=True)
    print(f"{len(lines)} answers added to {answers}, {len(done)} were there")


if __name__ == "__main__":
    typer.run(main)
