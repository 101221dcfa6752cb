"""Parts of the server by themselves: text, stop strings, and the choice of tokens."""

from __future__ import annotations

import collections
import itertools

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerFast,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fastattention.integrations.transformers.serving.sampling import Sampling, TokenChooser, choose
from fastattention.integrations.transformers.serving.text import Detokenizer, StopStrings


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(BPE({letter: index for index, letter in enumerate(letters)}, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=found, eos_token="<|end|>")  # type: ignore[no-untyped-call]


def test_text_comes_in_whole_characters_and_none_is_lost(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "a☃é 🙂 z"
    tokens = tokenizer(text)["input_ids"]
    one = Detokenizer(tokenizer, tokenizer("before")["input_ids"])
    pieces = [one.push(token) for token in tokens]
    assert [piece for piece in pieces if piece] == list(text)
    assert one.finish() == ""
    cut = Detokenizer(tokenizer, [])
    assert [cut.push(token) for token in tokenizer("☃")["input_ids"][:2]] == ["", ""]
    assert cut.finish() == "\ufffd"


@pytest.mark.parametrize("stops", [["END"], ["EN", "NDx"], ["ab", "bcE"], ["zzz"], []], ids=str)
def test_stop_strings_are_found_however_a_text_is_cut(stops: list[str]) -> None:
    text = "aEbEcENDxE"
    places = [at for one in stops if (at := text.find(one)) >= 0]
    expected = text[: min(places)] if places else text
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        pieces, last = [], 0
        for at, cut in enumerate([*cuts, True], start=1):
            if cut:
                pieces.append(text[last:at])
                last = at
        one, found, stopped = StopStrings(stops), "", False
        for piece in pieces:
            given, stopped = one.push(piece)
            found += given
            if stopped:
                break
        assert found + ("" if stopped else one.finish()) == expected
        assert stopped == bool(places)


def test_of_equal_scores_the_first_is_greedy() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0], [4.0, 4.0, 2.0]])
    assert choose(scores, [TokenChooser(Sampling(), []), TokenChooser(Sampling(temperature=1e-6), [])])[0] == [1, 0]


SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=1.0, min_p=0.2),
    Sampling(temperature=2.0, top_k=12, top_p=0.7, min_p=0.05),
]


def test_tokens_are_drawn_from_the_distribution_of_transformers() -> None:
    scores = torch.randn(len(SETTINGS), 20, generator=torch.Generator().manual_seed(0)) * 2
    draws = 4000
    choosers = [TokenChooser(Sampling(**{**vars(one), "seed": "a"}), []) for one in SETTINGS]
    drawn = [choose(scores.clone(), choosers)[0] for _ in range(draws)]
    for row, one in enumerate(SETTINGS):
        warpers = LogitsProcessorList([TemperatureLogitsWarper(one.temperature)])
        warpers += [TopKLogitsWarper(one.top_k)] if one.top_k else []
        warpers += [TopPLogitsWarper(one.top_p), MinPLogitsWarper(one.min_p)]
        expected = warpers(torch.zeros(1, 0), scores[row : row + 1]).softmax(-1)[0]
        counts = collections.Counter(tokens[row] for tokens in drawn)
        found = torch.tensor([counts[token] / draws for token in range(20)])
        assert (found > 0).tolist() == (expected > 5e-4).tolist() or one == SETTINGS[0]
        assert not found[expected == 0].any()
        # Five standard deviations of a frequency: the seed is fixed, so this holds or not for good.
        assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / draws).sqrt() + 1e-9).all()


def test_a_draw_depends_on_the_request_alone() -> None:
    scores = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    one = Sampling(temperature=1.0, seed="b")
    other = Sampling(temperature=1.0, top_k=3)
    alone = [choose(scores[:1].clone(), [TokenChooser(one, [])])[0][0] for _ in range(2)]
    beside = choose(scores.clone(), [TokenChooser(one, []), TokenChooser(other, []), TokenChooser(other, [])])[0][0]
    assert alone == [beside] * 2
