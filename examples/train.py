"""Train a small language model on a CPU, with torch's attention and with fast_attention.

    pip install '.[transformers]'
    python examples/train.py    # a few minutes on two cores

The model has the demo model's architecture and new weights. It learns to write this package, a byte at a time. In long
runs rounding grows into small differences of the losses, as it does between sdpa and eager.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM

import fastattention.integrations.transformers  # registers the name "fast_attention"

PACKAGE = Path(fastattention.__file__).parent


def new_model(attention: str) -> torch.nn.Module:
    torch.manual_seed(0)  # the same weights every time
    config = AutoConfig.from_pretrained(Path(__file__).parent / "demo_model", dtype=torch.float32)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)  # type: ignore[no-any-return, no-untyped-call]


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> tuple[float, float]:
    """The loss, and the seconds that the step took."""
    begin = time.perf_counter()
    loss = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), time.perf_counter() - begin


def main(steps: int = 100, seqlen: int = 2048) -> None:
    text = torch.tensor([*b"".join(path.read_bytes() for path in sorted(PACKAGE.rglob("*.py")))])
    models = new_model("sdpa"), new_model("fast_attention")
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    difference, seconds = 0.0, []
    print(f"{'step':>12} {'sdpa':>14} {'fast_attention':>14}")
    for step in range(steps):
        tokens = text[int(torch.randint(len(text) - seqlen, ())) :][None, :seqlen]
        (sdpa, sdpa_seconds), (fast, fast_seconds) = map(train_step, models, optimizers, (tokens, tokens))
        difference = max(difference, abs(sdpa - fast))
        seconds.append((sdpa_seconds, fast_seconds))
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            print(f"{step:12} {sdpa:14.5f} {fast:14.5f}")
    print(f"{'s per step':>12} " + " ".join(f"{median(each):14.3f}" for each in zip(*seconds, strict=True)))
    print(f"largest difference of the losses: {difference:.1e}")


if __name__ == "__main__":
    typer.run(main)
