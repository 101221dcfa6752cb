"""ModelShape: the dimensions of a transformer, and the bytes of its weights and KV cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastattention.errors import ArgumentError

SCALE_BYTES = 4  # a quantized cache has a float32 scale a token and head, for keys and for values


@dataclass(frozen=True)
class ModelShape:
    """A decoder of equal layers: attention without biases, an MLP, two norms.

    Raises ArgumentError for dimensions that do not fit each other.
    """

    name: str
    num_layers: int
    nheads: int
    nheads_k: int
    headdim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    headdim_v: int = 0  # 0: headdim
    dtype_bytes: int = 2  # bytes of a weight, and of an element of keys and values
    window: int | None = None  # tokens that layers with a sliding window keep
    window_layers: frozenset[int] = frozenset()  # which layers have it, from 0
    tied_embeddings: bool = False  # logits use the embedding's weights
    gated_mlp: bool = True  # three matrices rather than two
    values_in_keys: bool = False  # latents: keys hold the values, and all heads share one
    expanded_headdim: int = 0  # with latents: elements of a head's key and value before queries absorb the projection
    selected_keys: int = 0  # keys that each query attends to, chosen by an indexer; 0: all
    indexer_headdim: int = 0  # elements of a token's key for the indexer, which stay on the GPU

    def __post_init__(self) -> None:
        if self.headdim_v == 0:
            object.__setattr__(self, "headdim_v", self.headdim)
        for field in _POSITIVE:
            if getattr(self, field) < 1:
                raise ArgumentError(f"{field}={getattr(self, field)} of {self.name} is not positive")
        if self.nheads % self.nheads_k:
            raise ArgumentError(f"nheads_k={self.nheads_k} of {self.name} does not divide nheads={self.nheads}")
        if bool(self.window_layers) != (self.window is not None) or (self.window is not None and self.window < 1):
            raise ArgumentError(
                f"window={self.window} and window_layers={sorted(self.window_layers)} of {self.name} do not go "
                "together; give a window of at least 1 token and the layers that have it, or neither"
            )
        if not self.window_layers <= set(range(self.num_layers)):
            raise ArgumentError(
                f"window_layers={sorted(self.window_layers)} of {self.name} are not all from 0 to {self.num_layers - 1}"
            )

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The layers that keep every token."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.window_layers)

    @property
    def layer_weight_bytes(self) -> int:
        """Bytes of a layer's weights: queries and the output have nheads, keys and values nheads_k."""
        attention = self.hidden_size * (self.nheads + self.nheads_k) * (self.headdim + self.headdim_v)
        if self.values_in_keys:
            # Latents are projected from hidden states, and to keys and values of all heads; queries and the output have
            # as many elements as these. A low rank of queries is left out: it takes less.
            latents = self.headdim * (self.hidden_size + self.nheads * self.expanded_headdim)
            attention = self.hidden_size * self.nheads * self.expanded_headdim + latents
        mlp = (3 if self.gated_mlp else 2) * self.hidden_size * self.intermediate_size
        return (attention + mlp + 2 * self.hidden_size) * self.dtype_bytes

    @property
    def logits_weight_bytes(self) -> int:
        """Bytes of the weights of the last product, over the vocabulary."""
        return self.vocab_size * self.hidden_size * self.dtype_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights: layers, embedding, logits, the last norm."""
        vocabulary = self.logits_weight_bytes * (1 if self.tied_embeddings else 2)
        return self.num_layers * self.layer_weight_bytes + vocabulary + self.hidden_size * self.dtype_bytes

    def kv_bytes_per_token(self, *, quantized: bool = False) -> int:
        """Bytes of keys and values of a token in one layer; quantized: an int8 or float8 cache with its scales."""
        elements = self.headdim if self.values_in_keys else self.headdim + self.headdim_v
        scales = (2 - self.values_in_keys) * SCALE_BYTES
        per_head = elements + scales if quantized else elements * self.dtype_bytes
        return self.nheads_k * per_head

    def sharded(self, tp: int) -> ModelShape:
        """The share of one of `tp` tensor-parallel ranks.

        Heads, MLP and vocabulary are divided. Fewer key heads than ranks are replicated, one a rank. Raises
        ArgumentError when something does not divide.
        """
        if tp < 1:
            raise ArgumentError(f"tp={tp} is not positive")
        for field in ("nheads", "intermediate_size", "vocab_size"):
            if getattr(self, field) % tp:
                raise ArgumentError(f"tp={tp} does not divide {field}={getattr(self, field)} of {self.name}")
        if max(tp, self.nheads_k) % min(tp, self.nheads_k):
            raise ArgumentError(f"tp={tp} and nheads_k={self.nheads_k} of {self.name}: neither divides the other")
        return replace(
            self,
            nheads=self.nheads // tp,
            nheads_k=max(self.nheads_k // tp, 1),
            intermediate_size=self.intermediate_size // tp,
            vocab_size=self.vocab_size // tp,
        )


_POSITIVE = "num_layers nheads nheads_k headdim headdim_v hidden_size intermediate_size vocab_size dtype_bytes".split()


def _pangu(name: str, num_layers: int, nheads: int) -> ModelShape:
    """A PanGu model. Its dimensions are not published; they are derived from the number of parameters in its name.

    As in PanGu-alpha (arXiv 2104.12369): an MLP of four times the hidden size without a gate, a vocabulary of 40000,
    tied embeddings, as many key heads as heads. With heads of 128, the hidden sizes are guesses among what eight ranks
    divide, and the number of layers follows.
    """
    hidden_size = 128 * nheads
    return ModelShape(
        name=name,
        num_layers=num_layers,
        nheads=nheads,
        nheads_k=nheads,
        headdim=128,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        vocab_size=40000,
        tied_embeddings=True,
        gated_mlp=False,
    )


# LLaMA: num_layers, nheads, nheads_k, headdim, hidden_size, intermediate_size, vocab_size as in the published configs.
PRESETS = {
    shape.name: shape
    for shape in (
        ModelShape("llama-2-7b", 32, 32, 32, 128, 4096, 11008, 32000),
        ModelShape("llama-2-70b", 80, 64, 8, 128, 8192, 28672, 32000),
        ModelShape("llama-3-8b", 32, 32, 8, 128, 4096, 14336, 128256),
        _pangu("pangu-38b", num_layers=47, nheads=64),
        _pangu("pangu-71b", num_layers=56, nheads=80),
    )
}


def find_model(name: str) -> ModelShape:
    """The preset of that name. Raises ArgumentError for others."""
    if name not in PRESETS:
        raise ArgumentError(f"model={name!r} is not known; choose from {', '.join(PRESETS)}")
    return PRESETS[name]
