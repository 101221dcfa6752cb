"""`fastattention bench model`: whole models with random weights, measured and shown on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import sampled, slow

from fastattention import ArgumentError
from fastattention.cli.bench.whole_model import command, decode
from fastattention.cli.bench.whole_model import measure as measuring
from fastattention.cli.bench.whole_model.build import build, find_config
from fastattention.cli.bench.whole_model.measure import ATTENTIONS, OURS, SDPA, Cell, Effort, Figures, measure
from fastattention.cli.bench.whole_model.report import ModelReport, Row
from fastattention.errors import UnsupportedError

from .conftest import RunCommand

SMALL = {"model_type": "llama", "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's shape, without weights."""
    path = tmp_path / "small"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SMALL))
    return path


@pytest.fixture
def model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(measuring.gc, "collect", lambda: 0)  # takes a second among all that tests import
    return build(find_config(str(folder), 2, 64), torch.float32, torch.device("cpu"))


def test_a_named_shape_is_that_of_its_model() -> None:
    config = find_config("llama-2-70b/8", None, 5000)
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (8192, 8, 1)
    assert (config.head_dim, config.intermediate_size, config.num_hidden_layers) == (128, 3584, 80)
    assert config.max_position_embeddings == 5000
    assert find_config("llama-3-8b", 4, 100).num_hidden_layers == 4


def test_a_model_without_a_gated_mlp_has_none() -> None:
    config = find_config("pangu-38b/8", 1, 64)
    config.hidden_size, config.intermediate_size, config.vocab_size = 256, 64, 40
    layer = build(config, torch.float32, torch.device("cpu")).model.layers[0]
    assert [name for name, _ in layer.mlp.named_parameters()] == ["c_fc.weight", "c_proj.weight"]
    assert layer.self_attn.q_proj.weight.shape == (8 * 128, 256)


@pytest.mark.parametrize(
    ("name", "layers", "message"),
    [
        ("gpt-9", None, "model='gpt-9' is neither a folder nor known; choose from llama-2-7b"),
        ("llama-2-7b/x", None, "model='llama-2-7b/x' is neither"),
        ("llama-2-7b/3", None, "tp=3 does not divide nheads=32"),
        ("llama-2-7b/0", None, "tp=0 is not positive"),
        ("llama-2-7b", 33, "layers=33 is more than the 32 of llama-2-7b"),
    ],
)
def test_a_model_that_is_not_there_is_refused(name: str, layers: int | None, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        find_config(name, layers, 64)


def test_a_folder_that_is_no_language_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="is not a Transformers model folder"):
        find_config(str(tmp_path), None, 64)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ArgumentError, match="cannot be read"):
        find_config(str(tmp_path), None, 64)
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(ArgumentError, match="has no num_hidden_layers"):
        find_config(str(tmp_path), None, 64)
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ArgumentError, match="model_type='vit' generates no text"):
        build(find_config(str(tmp_path), None, 64), torch.float32, torch.device("cpu"))


@torch.inference_mode()
def test_all_attentions_take_turns_on_the_same_prompt(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, tuple[int, ...]]] = []
    plain = decode.next_tokens

    def noted(given: Any, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        calls.append((given.config._attn_implementation, tuple(tokens.shape)))
        return plain(given, tokens, cache)

    for module in (decode, measuring):
        monkeypatch.setattr(module, "next_tokens", noted)
    fractions: list[float] = []
    figures = measure(model, Cell(2, 5), Effort(rounds=1, num_steps=3), fractions.append)
    assert calls == [call for _ in range(2) for name in ATTENTIONS for call in [(name, (2, 5)), *[(name, (2, 1))] * 3]]
    assert fractions == [one / 6 for one in range(1, 7)]
    for found in figures.values():
        assert len(found.prefill) == len(found.decode) == 2
        assert found.steady("prefill") == found.prefill[1]
        assert found.graphed_decode == []
        assert found.refused == {}


@sampled
@torch.inference_mode()
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate"), "out of memory"),
        (MemoryError(), "out of memory"),
        (UnsupportedError("sparse layers are not served\nmore"), "sparse layers are not served"),
    ],
)
def test_what_does_not_fit_is_said_and_left_out(
    model: Any, error: BaseException, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, tries = measuring.next_tokens, []

    def failing(given: Any, *rest: Any) -> torch.Tensor:
        if given.config._attn_implementation == SDPA:
            tries.append(SDPA)
            raise error
        return plain(given, *rest)

    monkeypatch.setattr(measuring, "next_tokens", failing)
    figures = measure(model, Cell(1, 4), Effort(rounds=2, num_steps=1))
    assert tries == [SDPA]
    assert figures[SDPA].refused == {"prefill": reason}
    assert figures[SDPA].steady("prefill") is None
    assert len(figures[OURS].decode) == 3


@torch.inference_mode()
def test_a_fault_of_ours_is_no_reason(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "next_tokens", lambda *_: (_ for _ in ()).throw(RuntimeError("a shape is wrong")))
    with pytest.raises(RuntimeError, match="a shape is wrong"):
        measure(model, Cell(1, 4), Effort(rounds=1, num_steps=1))


REPORT = ModelReport(
    "small", 2, "float32", Effort(2, 4), {"gpus": [], "cpu": "A CPU"},
    [Row(Cell(2, 100), {
        "eager": Figures(refused={"prefill": "out of memory"}),
        "sdpa": Figures([9.0, 0.2, 0.1, 0.4], [9.0, 0.5], peak_bytes=3 * 10**9),
        OURS: Figures([9.0, 0.1], [9.0, 1.0], peak_bytes=2 * 10**9),
    })],
)  # fmt: skip


def test_rates_are_tokens_a_second_of_the_median_round_after_the_first() -> None:
    row = REPORT.rows[0]
    assert row.rate("prefill", "sdpa") == 2 * 100 / 0.2
    assert row.rate("decode", "sdpa") == 2 / 0.5
    assert row.rate("prefill", "eager") is None
    prefill, decoding, memory = ([list(column.cells) for column in table.columns] for table in REPORT.tables())
    assert prefill == [["2 x 100"], ["out of memory"], ["1,000 (2.00)"], ["2,000"]]
    assert decoding == [["2 x 100"], ["out of memory"], ["4 (0.50)"], ["2"]]
    assert memory == [["2 x 100"], ["out of memory"], ["3.00"], ["2.00"]]


@slow
def test_bench_model_shows_and_writes_what_it_finds(
    run_command: RunCommand, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "QUICK_CELLS", (Cell(2, 16),))
    exit_code, output = run_command("bench", "model", "--quick", "--model", folder, "--layers", 1, "--output", "found")
    assert exit_code == 0
    for text in ("prefill, tokens/s", "decode, tokens/s", "peak memory", "2 x 16", OURS):
        assert text in output
    report = json.loads((tmp_path / "found" / "model_small.json").read_text())
    assert (report["question"], report["num_layers"], report["dtype"]) == ("model", 1, "bfloat16")
    assert [(row["batch_size"], row["seqlen"]) for row in report["rows"]] == [(2, 16)]
    for row in report["rows"]:
        for found in row["figures"].values():
            assert len(found["prefill"]) == len(found["decode"]) == 2
    assert (tmp_path / "found" / "model_small.png").stat().st_size > 10000
