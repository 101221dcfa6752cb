"""A decoder of random weights with as little overhead as torch allows, to time a token apart from its cache.

On a GPU everything between two attentions is one CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattention.offload.model_shape import ModelShape

# A function of layer, queries, new keys and values, each (batch_size, 1, heads, headdim). The result has the shape of
# the queries.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Weights(NamedTuple):
    """Weights of a layer."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


class BareDecoder:
    """RMS norms, projections, a rotation of fixed angle, attention, a gated MLP; logits at the end."""

    def __init__(self, shape: ModelShape, batch_size: int, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self._dtype, self._device = shape, dtype, device
        self._layers = [self._random_weights() for _ in range(shape.num_layers)]
        self._logits = self._random(shape.vocab_size, shape.hidden_size)
        self._angle = self._random(shape.headdim // 2)
        self.hidden = self._random(batch_size, 1, shape.hidden_size)  # of the newest tokens; every step changes it
        self._attended = self._random(batch_size, 1, shape.nheads, shape.headdim)
        self._qkv = [
            self._random(batch_size, 1, n, shape.headdim) for n in (shape.nheads, shape.nheads_k, shape.nheads_k)
        ]
        self._likeliest = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        segments: list[Callable[[], None]] = [
            functools.partial(self._between, index) for index in range(shape.num_layers + 1)
        ]
        self._segments = _captured(segments) if device.type == "cuda" else segments

    def step(self, attend: Attend) -> Tensor:
        """Decodes one token for every sequence, the likeliest."""
        self._segments[0]()
        for layer in range(self.shape.num_layers):
            self._attended.copy_(attend(layer, *self._qkv))
            self._segments[layer + 1]()
        return self._likeliest

    def _between(self, layer: int) -> None:
        """Computes the rest of the layer before, then all of `layer` before its attention."""
        hidden = self.hidden
        if layer:
            weights = self._layers[layer - 1]
            hidden = hidden + F.linear(self._attended.flatten(2), weights.out)
            gate, up = F.linear(self._norm(hidden), weights.gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, weights.down)
        if layer == self.shape.num_layers:
            self._likeliest.copy_(F.linear(self._norm(hidden), self._logits).argmax(dim=-1))
            return
        heads = [each.shape[2] for each in self._qkv]
        qkv = F.linear(self._norm(hidden), self._layers[layer].qkv).unflatten(2, (-1, self.shape.headdim))  # type: ignore[no-untyped-call]
        q, k, v = qkv.split(heads, dim=2)
        for target, source in zip(self._qkv, (self._rotate(q), self._rotate(k), v), strict=True):
            target.copy_(source)
        self.hidden.copy_(hidden)

    def _norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.shape.hidden_size,))

    def _rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        cos, sin = self._angle.cos(), self._angle.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _random_weights(self) -> Weights:
        shape = self.shape
        heads = shape.nheads * shape.headdim
        return Weights(
            self._random(heads + 2 * shape.nheads_k * shape.headdim, shape.hidden_size),
            self._random(shape.hidden_size, heads),
            self._random(2 * shape.intermediate_size, shape.hidden_size),
            self._random(shape.hidden_size, shape.intermediate_size),
        )

    def _random(self, *size: int) -> Tensor:
        return torch.randn(size, dtype=self._dtype, device=self._device).mul_(size[-1] ** -0.5)


def _captured(segments: list[Callable[[], None]]) -> list[Callable[[], None]]:
    """Each segment as a CUDA graph. All are on one stream: cuBLAS keeps 32 MiB for every stream that it has seen."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    graphs = []
    for segment in segments:
        with torch.cuda.stream(stream):  # what libraries set up in their first call must not be captured
            segment()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            segment()
        graphs.append(graph)
    torch.cuda.current_stream().wait_stream(stream)
    return [graph.replay for graph in graphs]
