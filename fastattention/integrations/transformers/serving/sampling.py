"""Chooses the next token of every request of a batch by the request's own parameters."""

from __future__ import annotations

import collections
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.integrations.transformers.serving.grammar import Grammar

LEAST_LOGPROB = -9999.0  # JSON has no infinity
GREEDY_BELOW = 1e-5  # temperatures under this take the likeliest token


@dataclass(frozen=True)
class Sampling:
    """How one request's tokens are chosen."""

    temperature: float = 0.0  # 0 takes the likeliest token
    top_k: int = 0  # 0 takes all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # of tokens in the prompt too
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: str | None = None  # makes the draws reproducible
    logprobs: int | None = None  # alternatives to report; None reports no log probabilities
    end_tokens: tuple[int, ...] = ()  # each ends the answer
    min_tokens: int = 0  # before as many, no token of end_tokens is chosen


class TokenLogprob(NamedTuple):
    """Log probability of a token by the model, before penalties, temperature and constraints."""

    token: int
    logprob: float | None  # None: of the first token of a prompt
    top: list[tuple[int, float]]  # the likeliest tokens


class TokenChooser:
    """Chooses the tokens of one request. It keeps what its tokens so far imply."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], grammar: Grammar | None = None) -> None:
        self.sampling, self.grammar = sampling, grammar
        self.random = random.Random(sampling.seed)
        self._counts: collections.Counter[int] = collections.Counter()
        self._seen = set(prompt) if sampling.repetition_penalty != 1.0 else None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.sampling.temperature < GREEDY_BELOW

    def adjust(self, scores: Tensor) -> None:
        """Changes the scores (vocab_size,) in place by penalties, biases and the grammar."""
        one = self.sampling
        if self._seen is not None:
            tokens = torch.tensor(list(self._seen), dtype=torch.int64, device=scores.device)
            found = scores[tokens]
            scores[tokens] = torch.where(found > 0, found / one.repetition_penalty, found * one.repetition_penalty)
        if self._counts and (one.presence_penalty or one.frequency_penalty):
            counts = torch.tensor(list(self._counts.values()), dtype=torch.float32, device=scores.device)
            tokens = torch.tensor(list(self._counts), dtype=torch.int64, device=scores.device)
            scores[tokens] -= counts * one.frequency_penalty + one.presence_penalty
        if one.logit_bias:
            tokens = torch.tensor(list(one.logit_bias), dtype=torch.int64, device=scores.device)
            biases = torch.tensor(list(one.logit_bias.values()), dtype=torch.float32, device=scores.device)
            scores[tokens] += biases
        if one.min_tokens and one.end_tokens and self._counts.total() < one.min_tokens:
            scores[list(one.end_tokens)] = -torch.inf
        if self.grammar is not None:
            self.grammar.restrict(scores)

    def accept(self, token: int) -> None:
        """Takes note of the token that was chosen."""
        self._counts[token] += 1
        if self._seen is not None:
            self._seen.add(token)
        if self.grammar is not None:
            self.grammar.accept(token)


def choose(logits: Tensor, choosers: Sequence[TokenChooser]) -> tuple[list[int], list[TokenLogprob | None]]:
    """The next token of each request, and its log probability where that was asked for.

    logits: float32 (requests, vocab_size); changed in place
    """
    reported = [row for row, one in enumerate(choosers) if one.sampling.logprobs is not None]
    raw = logits[reported].log_softmax(-1).clamp(min=LEAST_LOGPROB)
    for row, one in enumerate(choosers):
        one.adjust(logits[row])
    chosen = logits.argmax(-1)
    sampled = [row for row, one in enumerate(choosers) if not one.greedy]
    cut = [row for row in sampled if _is_cut(choosers[row].sampling)]
    # Sorting a vocabulary costs more than the rest of a choice: only requests that need it pay for it.
    for rows in (cut, [row for row in sampled if row not in cut]):
        if rows:
            chosen[rows] = _sample(logits[rows], [choosers[row] for row in rows], rows is cut)
    tokens: list[int] = chosen.tolist()
    logprobs: list[TokenLogprob | None] = [None] * len(tokens)
    for row, values in zip(reported, raw, strict=True):
        logprobs[row] = likeliest(tokens[row], values, choosers[row].sampling.logprobs or 0)
    for token, one in zip(tokens, choosers, strict=True):
        one.accept(token)
    return tokens, logprobs


def likeliest(token: int, values: Tensor, top: int) -> TokenLogprob:
    """What is reported of a token. values: (vocab_size,) log probabilities; top: alternatives."""
    found = values.topk(min(top, len(values)))
    return TokenLogprob(
        token, values[token].item(), list(zip(found.indices.tolist(), found.values.tolist(), strict=True))
    )


def _is_cut(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def _sample(scores: Tensor, choosers: Sequence[TokenChooser], cut: bool) -> Tensor:
    """Tokens drawn by inverting the cumulative distribution at one uniform number per request.

    A draw therefore depends on nothing but the request's scores and seed.
    """

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=scores.device)[:, None]

    settings = [one.sampling for one in choosers]
    weights = (scores.double() / column([one.temperature for one in settings])).softmax(-1)
    order = None
    if cut:
        limits = [min(one.top_k, scores.shape[-1]) or scores.shape[-1] for one in settings]
        weights, order = weights.topk(max(limits), dim=-1)  # sorts all unless every request has a top_k
        ranks = torch.arange(max(limits), device=scores.device)
        weights = weights.where(ranks < column(limits), 0.0)
        weights = weights / weights.sum(-1, keepdim=True)
        before = weights.cumsum(-1) - weights
        kept = (before < column([one.top_p for one in settings])) & (
            weights >= weights[:, :1] * column([one.min_p for one in settings])
        )
        weights = weights.where(kept, 0.0)
    ends = weights.cumsum(-1)
    drawn = column([one.random.random() for one in choosers]) * ends[:, -1:]
    places = torch.searchsorted(ends, drawn, right=True)
    places = places.minimum((weights > 0).sum(-1, keepdim=True) - 1) if cut else places.clamp(max=weights.shape[-1] - 1)
    return (places if order is None else order.gather(-1, places))[:, 0]
