"""Prefill, decode and peak memory of one batch and length: all attentions take turns in one process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from fastattention.cli import peak_memory
from fastattention.cli.bench.whole_model.decode import GraphedDecode, next_tokens, stepper
from fastattention.cli.console import OUT_OF_MEMORY, first_line
from fastattention.errors import FastAttentionError
from fastattention.integrations.transformers import NAME

Result = TypeVar("Result")
EAGER, SDPA, OURS = "eager", "sdpa", NAME
ATTENTIONS = (EAGER, SDPA, OURS)


class Cell(NamedTuple):
    """Prompts of one length."""

    batch_size: int
    seqlen: int


class Effort(NamedTuple):
    """How long to measure."""

    rounds: int  # rounds after the first, which counts separately
    num_steps: int  # decoded tokens of a round


@dataclass
class Figures:
    """Results of one attention: seconds of each round, with the first; or the reason why there are none."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)  # seconds of the median step
    graphed_decode: list[float] = field(default_factory=list)
    peak_bytes: int | None = None  # peak of a prefill, weights included
    refused: dict[str, str] = field(default_factory=dict)  # by the names of the three lists

    def steady(self, what: str) -> float | None:
        """Median seconds of the rounds after the first, which builds plans and compiles."""
        seconds: list[float] = getattr(self, what)
        return median(seconds[1:]) if len(seconds) > 1 else None


def measure(
    model: PreTrainedModel, cell: Cell, effort: Effort, on_progress: Callable[[float], None] = lambda fraction: None
) -> dict[str, Figures]:
    """Figures by attention. An attention that does not fit or serve is left out of later rounds, with its reason."""
    figures = {name: Figures() for name in ATTENTIONS}
    tokens = torch.randint(model.config.vocab_size, cell, device=model.device, dtype=torch.int64)
    turns = [(_turn, name) for _ in range(effort.rounds + 1) for name in ATTENTIONS]
    if model.device.type == "cuda":
        turns += [(_graphed_turn, name) for name in ATTENTIONS]
    for done, (turn, name) in enumerate(turns):
        if "prefill" not in figures[name].refused:
            model.set_attn_implementation(name)
            turn(model, tokens, effort, figures[name])
        on_progress((done + 1) / len(turns))
    return figures


def _turn(model: PreTrainedModel, tokens: Tensor, effort: Effort, figures: Figures) -> None:
    """One prefill and some steps after it."""
    with _refusals(figures, "prefill"):
        cache = DynamicCache(config=model.config)
        _reset_peak(model.device)
        seconds, newest = _timed(model.device, lambda: next_tokens(model, tokens, cache))
        figures.prefill.append(seconds)
        figures.peak_bytes = max(figures.peak_bytes or 0, _peak_bytes(model.device)) or None
    if "prefill" not in figures.refused and "decode" not in figures.refused:
        with _refusals(figures, "decode"):
            figures.decode.append(seconds_of_a_step(model.device, stepper(model, newest, cache), effort.num_steps))


def _graphed_turn(model: PreTrainedModel, tokens: Tensor, effort: Effort, figures: Figures) -> None:
    """All rounds of decoding by a graph. Only one graph is kept at a time."""
    with _refusals(figures, "graphed_decode"):
        decode = GraphedDecode(model, tokens, effort.num_steps * (effort.rounds + 1))
        for _ in range(effort.rounds + 1):
            figures.graphed_decode.append(seconds_of_a_step(model.device, decode.step, effort.num_steps))


def seconds_of_a_step(device: torch.device, step: Callable[[], object], num_steps: int) -> float:
    """The median of num_steps steps. Each lasts until its token is there, because generation waits for it."""
    return median(_timed(device, step)[0] for _ in range(num_steps))


def _timed(device: torch.device, call: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds until the device is done, and the result."""
    _synchronize(device)
    start = time.perf_counter()
    result = call()
    _synchronize(device)
    return time.perf_counter() - start, result


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif peak_memory.why_unavailable() is None:
        peak_memory.reset_peak()


def _peak_bytes(device: torch.device) -> int:
    """Peak memory since the reset; 0 where it is not known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_memory.peak_bytes() if peak_memory.why_unavailable() is None else 0


@contextmanager
def _refusals(figures: Figures, what: str) -> Iterator[None]:
    """Records why there is no figure: no memory, or an attention that does not serve the model."""
    try:
        yield
    except (FastAttentionError, MemoryError, RuntimeError) as error:
        if isinstance(error, FastAttentionError):
            figures.refused[what] = first_line(error)
        elif isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
            figures.refused[what] = "out of memory"
        elif what == "graphed_decode":
            figures.refused[what] = f"not captured: {first_line(error)}"
        else:
            raise
        getattr(figures, what).clear()
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
