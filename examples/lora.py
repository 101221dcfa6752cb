"""Fine-tune a model by LoRA (arXiv 2106.09685) on a CPU, or on a GPU as old as a T4: only small matrices are trained.

    pip install '.[transformers]'
    python examples/lora.py

The adapters are a few lines of torch; `peft` works in the same way.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import torch
import typer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import fastattention.integrations.transformers  # registers the name "fast_attention"

PACKAGE, MODEL = Path(fastattention.__file__).parent, Path(__file__).parent / "demo_model"


class Adapted(nn.Module):
    """A linear layer plus a product of two matrices of low rank, which begins at zero."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T  # type: ignore[no-any-return]


def main(steps: int = 40, seqlen: int = 1024) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation="fast_attention", dtype=torch.float32)
    for name, layer in [*model.requires_grad_(False).named_modules()]:
        if name.endswith(("q_proj", "k_proj", "v_proj", "o_proj")):
            model.set_submodule(name, Adapted(layer))
    model = model.to(device)  # type: ignore[arg-type]
    print(f"{model.num_parameters(only_trainable=True)} of {model.num_parameters()} parameters are trained")
    optimizer = torch.optim.AdamW((x for x in model.parameters() if x.requires_grad), lr=3e-3)
    text = torch.tensor([*b"".join(path.read_bytes() for path in sorted(PACKAGE.rglob("*.py")))])
    losses: list[float] = []
    for _ in range(steps):
        tokens = text[int(torch.randint(len(text) - seqlen, ())) :][None, :seqlen].to(device)
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"mean loss of the first ten steps {fmean(losses[:10]):.3f}, of the last ten {fmean(losses[-10:]):.3f}")


if __name__ == "__main__":
    typer.run(main)
