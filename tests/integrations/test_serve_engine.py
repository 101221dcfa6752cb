"""The engine by itself, with models of several kinds of attention."""

from __future__ import annotations

import copy
import queue
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import slow
from transformers import AutoTokenizer
from word_model import save_word_model

from fastattention.integrations.transformers import batching
from fastattention.integrations.transformers.serving.engine import Engine, Generation, Piece
from fastattention.integrations.transformers.serving.sampling import Sampling, TokenChooser
from fastattention.integrations.transformers.serving.text import Detokenizer

from .models import DECODERS, VOCABULARY, pair
from .serving_models import SHAPE


def test_those_who_wait_begin_when_the_last_under_way_has_left(tmp_path: Path) -> None:
    save_word_model(tmp_path, VOCABULARY, **SHAPE)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    engine = Engine(copy.deepcopy(pair("llama").eager), tokenizer, kv_memory=8 << 20)
    pieces: list[Piece] = []
    leaving, waiting = (
        Generation([3, 4], TokenChooser(Sampling(), []), Detokenizer(tokenizer, []), max_tokens=9, deliver=deliver)
        for deliver in (lambda _: None, pieces.append)
    )
    with torch.no_grad():
        engine.submit([leaving])
        assert engine._step()
        engine._batch.scheduler.block_new_requests = True  # as Transformers does where pages are short
        engine.submit([waiting])
        assert engine._step()
        assert not pieces
        assert (engine.running, engine.waiting) == (1, 1)
        engine.cancel(leaving)
        assert engine._step()
    assert len(pieces) == 1


def test_others_go_on_while_a_long_prompt_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_word_model(tmp_path, VOCABULARY, **SHAPE)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    engine = Engine(copy.deepcopy(pair("llama").eager), tokenizer, kv_memory=8 << 20)
    took: list[tuple[int, int]] = []  # answers under way, and tokens of prompts that were read
    monkeypatch.setattr(engine._budget, "tokens", lambda answers, longest: 64)
    monkeypatch.setattr(engine._budget, "took", lambda answers, read, seconds: took.append((answers, read)))
    short: list[Piece] = []
    long: list[Piece] = []
    first, second = (
        Generation(prompt, TokenChooser(Sampling(), []), Detokenizer(tokenizer, []), max_tokens=30, deliver=deliver)
        for prompt, deliver in (([3, 4], short.append), ([5] * 400, long.append))
    )
    with torch.no_grad():
        engine.submit([first])
        assert engine._step()
        engine.submit([second])
        for step in range(2, 8):  # 63 tokens of the long prompt beside one of the other
            assert engine._step()
            assert (len(short), len(long)) == (step, 0)
        assert engine._step()
        assert engine._step()
    assert (len(short), len(long)) == (9, 2)
    assert took == [(0, 2), *[(1, 63)] * 6, (1, 400 - 6 * 63), (2, 0)]


class Recorder(TokenChooser):
    """Keeps the tokens: their text may not tell them."""

    def __init__(self) -> None:
        super().__init__(Sampling(), [])
        self.tokens: list[int] = []

    def accept(self, token: int) -> None:
        super().accept(token)
        self.tokens.append(token)


def served_tokens(engine: Engine, tokenizer: Any, prompts: list[list[int]], count: int = 12) -> list[list[int]]:
    """The answers of an engine that is started and stopped."""
    pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
    choosers = [Recorder() for _ in prompts]
    for prompt, chooser in zip(prompts, choosers, strict=True):
        detokenizer = Detokenizer(tokenizer, prompt)
        engine.submit([Generation(prompt, chooser, detokenizer, max_tokens=count, deliver=pieces.put)])
    engine.start()
    under_way = len(prompts)
    while under_way:
        piece = pieces.get(timeout=60)
        assert piece.error is None
        under_way -= piece.finish_reason is not None
    engine.stop(10)
    return [one.tokens[:count] for one in choosers]  # in host memory more may follow until the end is noticed


def greedy_tokens(eager: Any, prompts: list[list[int]], count: int = 12) -> list[list[int]]:
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": -1}
    return [eager.generate(torch.tensor([one]), **options)[0, len(one) :].tolist() for one in prompts]


@pytest.mark.parametrize("name", DECODERS)
def test_every_decoder_is_greedy_as_generate_is(name: str, tmp_path: Path) -> None:
    save_word_model(tmp_path, VOCABULARY, **SHAPE)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    eager = pair(name).eager
    engine = Engine(copy.deepcopy(eager), tokenizer, kv_memory=8 << 20)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in (2, 30, 75)]
    assert served_tokens(engine, tokenizer, prompts) == greedy_tokens(eager, prompts)


@pytest.mark.parametrize("name", ["llama", pytest.param("mistral", marks=slow)])
def test_requests_that_the_gpu_does_not_hold_are_served_from_host_memory(name: str, tmp_path: Path) -> None:
    save_word_model(tmp_path, VOCABULARY, **SHAPE)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    eager = pair(name).eager
    engine = Engine(copy.deepcopy(eager), tokenizer, kv_memory=384 << 10, cpu_kv_memory=64 << 20)
    assert engine.capacity == 768
    generator = torch.Generator().manual_seed(1)
    lengths = (40, 300, 300, 700, 900, 9)
    prompts = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    assert served_tokens(engine, tokenizer, prompts, 40) == greedy_tokens(eager, prompts, 40)


def test_an_answer_whose_step_fails_in_host_memory_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_word_model(tmp_path, VOCABULARY, **SHAPE)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    def failing(*args: Any) -> Any:
        raise RuntimeError("no processor left")

    monkeypatch.setattr(batching, "attend_to_host_pages", failing)
    engine = Engine(copy.deepcopy(pair("llama").eager), tokenizer, kv_memory=384 << 10, cpu_kv_memory=64 << 20)
    pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
    prompt = [5] * (engine.capacity + 700)
    chooser, detokenizer = TokenChooser(Sampling(), []), Detokenizer(tokenizer, [])
    engine.submit([Generation(prompt, chooser, detokenizer, max_tokens=9, deliver=pieces.put)])
    engine.start()
    error = pieces.get(timeout=60).error
    engine.stop(10)
    assert error is not None
    assert "no processor left" in str(error)
