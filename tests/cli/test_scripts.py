"""The scripts in benchmarks/ run, at sizes that take no time."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pages import linear
from tiers import deep, slow

from fastattention.backends.cpu.library import available_isas, load_library
from fastattention.backends.cpu.torch_threads import find_openmp
from fastattention.integrations.transformers import linear_layers, serve_linear_attention
from fastattention.offload.model_shape import ModelShape

pytestmark = slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load_script(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@deep
def test_isa_script_measures_the_instruction_set_it_is_told(tmp_path: Path) -> None:
    isa = available_isas()[0]
    arguments = ("--seqlen", "16", "--seconds", "0", "--output", str(tmp_path))
    command = [sys.executable, str(BENCHMARKS / "isa.py"), *arguments]
    subprocess.run(command, env={**os.environ, "FASTATTENTION_CPU_ISA": isa}, check=True, capture_output=True)
    report = read(tmp_path / f"isa_{isa}.json")
    details = {one["detail"] for one in report["measurements"] if one["peer"] == "fastattention"}
    assert details == {f"cpu {isa}"}
    assert {one["workload"]["dtype"] for one in report["measurements"]} == {"float32"}


@deep
def test_headdim_script_compares_with_the_limits(tmp_path: Path) -> None:
    load_script("headdim").main(seqlen=40, keys=128, seconds=0.0, output=tmp_path)
    rows = read(tmp_path / "headdim.json")["rows"]
    assert {tuple(row["works"]) for row in rows} == {("256", "512"), ("dense", "pages")}
    assert all(len(row["limits"]) == 2 and min(row["limits"].values()) > 0 for row in rows)


@deep
def test_quantized_cache_script_finds_what_rounding_costs(tmp_path: Path) -> None:
    load_script("quantized_cache").main(tokens=300, keys=64, seconds=0.0, output=tmp_path)
    report = read(tmp_path / "quantized_cache.json")
    errors = {(one["numbers"], one["cache"]): one["rms"] / one["rms_out"] for one in report["errors"]}
    assert errors["no outliers", "float16"] < errors["no outliers", "bfloat16"] < errors["no outliers", "int8"] < 0.05
    assert errors["outliers in keys", "int8"] > errors["outliers in keys", "float8"]
    assert errors["outliers in values, other channels", "int8"] > 4 * errors["no outliers", "int8"]
    assert len({numbers for numbers, _ in errors}) == 4 + 4  # layers of the model, and random tensors
    assert all(one["rms"] < 1e-2 for one in report["arithmetic"])
    assert len(report["times"]) == 4


@deep
def test_int8_script_finds_what_products_lose(tmp_path: Path) -> None:
    load_script("int8_errors").main(seqlen=150, tokens=150, output=tmp_path)
    report = read(tmp_path / "int8_errors.json")
    errors = {(one["numbers"], one["headdim"], one["method"]): one["relative_l1"] for one in report["errors"]}
    assert errors["normal", 128, "float16"] < errors["normal", 128, "bfloat16"] < errors["normal", 128, "int8"] < 0.02
    for headdim in (64, 128):
        smoothed = errors["offset in keys", headdim, "int8"]
        assert smoothed == pytest.approx(errors["normal", headdim, "int8"], rel=0.1)
        assert errors["offset in keys", headdim, "int8, not smoothed"] > 2 * smoothed
        assert errors["wide channels in keys", headdim, "int8"] > 2 * smoothed
    assert all(one["cosine_worst_head"] <= one["cosine"] for one in report["errors"])
    assert {one["heads"] for one in report["errors"] if one["numbers"] == "demo model"} == {4 * 4}
    assert all(
        one["bits"] == pytest.approx(report["model"]["exact_bits"], rel=1e-2) for one in report["model"]["records"]
    )


@deep
def test_memory_script_finds_the_square_of_eager_attention(tmp_path: Path) -> None:
    load_script("memory").main(shortest=1024, longest=1024, output=tmp_path)
    found = read(tmp_path / "memory.json")["peaks"]
    peaks = {peak["peer"]: peak for peak in found if peak["kind"] == "prefill"}
    assert set(peaks) == {"fastattention", "torch SDPA", "torch eager"}
    square = 1024**2 * 4 * 4  # one float32 matrix of scores for four heads
    assert peaks["torch eager"]["extra_bytes"] > square
    assert peaks["fastattention"]["extra_bytes"] < square
    assert peaks["fastattention"]["result_bytes"] == 1024 * 4 * 64 * 2
    assert (tmp_path / "memory.png").stat().st_size > 0


def test_memory_script_refuses_what_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = load_script("memory")
    monkeypatch.setattr(memory, "available_bytes", lambda: 8 * 2**30)
    peak = memory.measure_in_process("prefill", "torch eager", 65536)
    assert peak.extra_bytes is None
    assert peak.reason == "needs about 128 GiB, 8 GiB are available"


@pytest.fixture
def tiny_models() -> Iterator[ModuleType]:
    """The script of whole models, with a tiny one of each kind."""
    script = load_script("decode_in_model")
    script.SHAPE = ModelShape(  # type: ignore[attr-defined]
        "tiny", num_layers=2, nheads=4, nheads_k=2, headdim=16, hidden_size=64, intermediate_size=96, vocab_size=98
    )
    script.HYBRID |= {  # type: ignore[attr-defined]
        "num_hidden_layers": 3, "hidden_size": 64, "shared_intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 24, "vocab_size": 98,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }  # fmt: skip
    yield script
    serve_linear_attention()
    load_library().set_omp_team(find_openmp())


@pytest.mark.parametrize(("hybrid", "part"), [(False, "attention"), (True, "linear")], ids=["llama", "hybrid"])
def test_whole_models_are_timed_with_a_part_of_their_tokens(
    hybrid: bool, part: str, tiny_models: ModuleType, tmp_path: Path
) -> None:
    tiny_models.main(keys="5,9", dtypes="float32,bfloat16", rounds=1, tokens=2, hybrid=hybrid, output=tmp_path)
    (path,) = tmp_path.iterdir()
    report = read(path)
    assert path.stem == report["question"] == ("decode_in_hybrid_model" if hybrid else "decode_in_model")
    assert [(row["dtype"], row["keys"]) for row in report["rows"]] == [
        (dtype, keys) for dtype in ("float32", "bfloat16") for keys in (5, 9)
    ]
    for row in report["rows"]:
        assert set(row["seconds"]) == set(tiny_models.ATTENTIONS)
        assert all(row[f"{part}_seconds"][name] > 0 for name in row["seconds"])


@torch.inference_mode()
def test_a_hybrid_runs_our_functions_beside_our_attention_alone(
    tiny_models: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Mock(wraps=linear_layers.recurrent_ssd)
    monkeypatch.setattr(linear_layers, "recurrent_ssd", calls)
    model = tiny_models.build(tiny_models.config(True, 9), torch.float32, torch.device("cpu"))
    caches = tiny_models.random_caches(model, 5)
    for name, count in (("sdpa", 0), ("fast_attention", 2 * 3)):
        tiny_models.choose(model, name)
        tiny_models.seconds_of_a_token(model, caches[name], 3)
        assert calls.call_count == count
        assert caches[name].get_seq_length() == 5


def test_the_page_shows_a_hybrid_once_it_is_measured(
    tiny_models: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear.results, "RESULTS", tmp_path)
    assert linear._models() == []
    tiny_models.main(keys="5", dtypes="float32", rounds=1, tokens=1, hybrid=True, output=tmp_path)
    heading, _, _, table, source = linear._models()
    assert heading == "## A token of a whole model"
    assert "vs Transformers" in table
    assert "float32, 5 keys" in table
    assert "decode_in_hybrid_model.json" in source
