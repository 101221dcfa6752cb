"""The demo model with any attention in its layers, and a text that it has not seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaForCausalLM

import fastattention

FOLDER = Path(__file__).parents[1] / "examples" / "demo_model"
TEXT = Path(fastattention.__file__).parent / "attention" / "reference.py"
NAME = "by_the_benchmark"
# q, k, v, each (1, seqlen, heads, headdim) after rotary embedding, to the result in the shape of q.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class DemoModel:
    """In float32. It reads bytes."""

    def __init__(self) -> None:
        AttentionInterface.register(NAME, self._attend_in_layer)
        self._model = LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, attn_implementation=NAME)
        self._attend: Attend | None = None
        self.layers: list[tuple[Tensor, Tensor, Tensor]] = []  # q, k, v of the last run

    def read(self, tokens: Tensor, attend: Attend) -> Tensor:
        """The logits of all tokens but the first: (1, seqlen - 1, vocabulary)."""
        self._attend = attend
        self.layers.clear()
        with torch.no_grad():
            logits: Tensor = self._model(tokens).logits[:, :-1]
        return logits

    def _attend_in_layer(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, None]:
        """Transformers' tensors are (batch_size, heads, seqlen, headdim)."""
        assert self._attend is not None
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        self.layers.append((q, k, v))
        return self._attend(q, k, v).to(q.dtype), None


def read_text(tokens: int) -> Tensor:
    """(1, up to `tokens`) of the text."""
    return torch.tensor([[0, *TEXT.read_bytes()]])[:, :tokens]
