"""MicroBatchedCache: the GPU computes layers of one half of a batch while the CPU attends for the other."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import Cache, PretrainedConfig, PreTrainedModel
from transformers.utils.generic import ModelOutput

from fastattention.errors import ArgumentError, UnsupportedError
from fastattention.integrations.transformers.batch_parts import join, split, tokens_of
from fastattention.integrations.transformers.cache import FastAttentionCache, Half
from fastattention.offload.device import Device, cuda_device
from fastattention.offload.kv_store import MOST_QUERIES_ON_CPU
from fastattention.offload.micro_batches import run_together


class MicroBatchedCache(Cache):
    """A `FastAttentionCache` for each half of a batch, whose decode steps overlap under `overlapped`.

        cache = MicroBatchedCache(model.config, gpu_memory="16GiB")
        with overlapped(model, cache):
            model.generate(**inputs, cache=cache)  # past_key_values=cache before Transformers 5.24

    The arguments are those of `FastAttentionCache`. Each half gets its share of the budgets, by its number of
    sequences. The first half has one sequence more when their number is odd. A single sequence is not divided.

    While the CPU attends for one half, the GPU computes layers of the other. The weights are read twice for that, so it
    pays only when the CPU's attention takes longer (`fastattention plan offload --batch` predicts it).

    The first pass and passes of more than 32 tokens go through the model one half after the other. A forward
    pass that fails in either half changes neither. Beam search is refused, because sequences keep their place.
    """

    def __init__(self, config: PretrainedConfig, gpu_memory: int | str | None = None, **given: Any) -> None:
        self.halves = tuple(FastAttentionCache(config, gpu_memory, **given) for _ in range(2))
        self._device: Device | None = given.get("device")
        self._rows: list[int] = []  # number of sequences in each half in use
        self._before: int | None = None  # tokens before an unfinished forward pass
        super().__init__(layers=self.halves[0].layers)

    @property
    def length(self) -> int:
        """Tokens of every sequence, without those of a current or interrupted forward pass."""
        lengths = [half.length for half in self._used()]
        return min(lengths if self._before is None else [self._before, *lengths], default=0)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """`length`, of any layer."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(keys with the new ones, tokens that were forgotten) of a layer."""
        self._undo_interrupted()
        sizes: tuple[int, int] = self.halves[0].get_mask_sizes(query_length, layer_idx)
        return sizes

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -tokens_to_remove tokens of every sequence."""
        self._undo_interrupted()
        for half in self._used():
            half.crop(tokens_to_remove)

    def reset(self) -> None:
        """Forgets all tokens and the batch size, and frees the memory."""
        self._rows, self._before = [], None
        for half in self.halves:
            half.reset()

    def activate_past_recording(self) -> None:
        """Activates it in both halves."""
        for half in self.halves:
            half.activate_past_recording()  # type: ignore[no-untyped-call]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> NoReturn:
        """Refused: a model updates the halves."""
        raise UnsupportedError("a MicroBatchedCache needs `with overlapped(model, cache):` around calls of the model")

    def _refuse_selection(self, *_: Any, **__: Any) -> NoReturn:
        """Refused."""
        raise UnsupportedError(
            "sequences of a MicroBatchedCache cannot change places, which beam search needs; use a FastAttentionCache"
        )

    reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse_selection

    def run(self, forward: Callable[..., ModelOutput], given: dict[str, Any]) -> ModelOutput:
        """Runs a forward pass of the whole batch as one for each half.

        - `forward`: takes the cache of a half, and arguments by name
        - `given`: these arguments, of the whole batch

        Raises ArgumentError for another number of sequences than before, UnsupportedError for arguments that cannot
        be divided, and whatever either pass raises; the cache is then as it was.
        """
        tokens = tokens_of(given)
        self._undo_interrupted()
        rows = self._rows or _rows(tokens.shape[0])
        if sum(rows) != tokens.shape[0]:
            raise ArgumentError(f"the batch has {tokens.shape[0]} sequences and the cache {sum(rows)}; reset it")
        parts = split(given, rows)
        if not self._rows:
            self._divide(rows, tokens.device)
        self._before = self.length
        passes = [functools.partial(forward, half, **part) for half, part in zip(self._used(), parts, strict=True)]
        if len(passes) > 1 and self._before and tokens.shape[1] <= MOST_QUERIES_ON_CPU:
            outputs = run_together(self._device or cuda_device(tokens.device), passes)
        else:
            outputs = [each() for each in passes]
        joined = join(outputs, self)
        self._before = None
        return joined

    def _used(self) -> tuple[FastAttentionCache, ...]:
        return self.halves[: len(self._rows)]

    def _divide(self, rows: list[int], device: torch.device) -> None:
        """Divides the budgets for a new batch."""
        caps, batch_size = self.halves[0].caps(device), sum(rows)
        for half, count in zip(self.halves, rows, strict=False):
            share = caps._replace(gpu=caps.gpu * count // batch_size, cpu=caps.cpu * count // batch_size)
            half.hold(Half(share, batch_size))
        self._rows = rows

    def _undo_interrupted(self) -> None:
        """Undoes a pass that finished in only one half."""
        length = self.length
        if self._before is None and all(half.length == length for half in self._used()):
            return
        if not length:
            self.reset()  # another batch may follow
        for half in self._used():
            half.undo_last_pass(length)
        self._before = None


@contextlib.contextmanager
def overlapped(model: PreTrainedModel, cache: MicroBatchedCache) -> Iterator[None]:
    """Within this context `model.generate` and `model(...)` with this cache compute both halves of a batch at once.

    Calls with other caches do not change. Raises UnsupportedError for models that change while they compute.
    """
    _refuse_changing(model)
    forward, patched = model.forward, "forward" in vars(model)
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def in_halves(*args: Any, **kwargs: Any) -> Any:
        given = _by_name(signature, args, kwargs)
        name = next((name for name in ("past_key_values", "cache") if given.get(name) is cache), None)
        if name is None:
            return forward(*args, **kwargs)
        del given[name]
        return_dict = given.pop("return_dict", None)
        outputs = cache.run(lambda half, **part: forward(**{name: half}, **part, return_dict=True), given)
        as_dict = getattr(model.config, "return_dict", True) if return_dict is None else return_dict
        return outputs if as_dict else outputs.to_tuple()

    model.forward = in_halves
    try:
        yield
    finally:
        if patched:
            model.forward = forward
        else:
            del model.forward


def _by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call."""
    given = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return given


def _rows(batch_size: int) -> list[int]:
    """Sequences of each half."""
    return [batch_size] if batch_size < 2 else [batch_size - batch_size // 2, batch_size // 2]


def _refuse_changing(model: nn.Module) -> None:
    """Refuses rotary embeddings that change with the length of sequences: both halves would change them at once."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                raise UnsupportedError(
                    f"rope_type={kind!r} changes the model with the length of the sequences, which two halves cannot "
                    "do at once; use a FastAttentionCache"
                )
