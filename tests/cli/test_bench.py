"""`fastattention bench`: tables, JSON and pictures from a real run of small problems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import deep, slow

from fastattention.cli.bench import record
from fastattention.cli.bench import session as sessions
from fastattention.cli.bench.measure import Measurement
from fastattention.cli.bench.peaks import PeakRates
from fastattention.cli.bench.report import BenchReport, fastattention_speedup, fraction_of_limit
from fastattention.cli.bench.suite import QUESTIONS, full_suite, quick_suite
from fastattention.cli.bench.timing import Timing
from fastattention.cli.bench.workload import BenchWorkload

from .conftest import RunCommand

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
SECONDS_KEYS = {"median", "lower_quartile", "upper_quartile", "calls"}


@pytest.fixture
def known_limits(monkeypatch: pytest.MonkeyPatch) -> PeakRates:
    """Fixed limits, because measuring them takes seconds."""
    limits = PeakRates(fma=100.0, bf16_dot=200.0, dram_read=10.0)
    monkeypatch.setattr(sessions, "measure_limits", lambda: limits)
    return limits


def check_schema(report: dict[str, Any], question: str) -> None:
    assert report["schema"] == 1
    assert report["question"] == question
    assert {"cpu", "versions", "num_threads", "commit", "command", "cuda", "driver"} <= set(report["machine"])
    assert {"fastattention", "torch SDPA"} & set(report["peers"])
    for one in report["measurements"]:
        assert (one["seconds"] is None) == (one["reason"] is not None)
        if one["seconds"] is not None:
            assert set(one["seconds"]) == SECONDS_KEYS
            assert 0 < one["seconds"]["lower_quartile"] <= one["seconds"]["median"] <= one["seconds"]["upper_quartile"]
            assert one["gflops"] > 0
            assert one["gbytes_per_s"] > 0
            assert one["max_error"] < 0.05
            assert one["fraction_of_limit"] is None or one["fraction_of_limit"] > 0
            assert (one["fastattention_speedup"] is None) == (one["peer"] == "fastattention")


@deep
def test_bench_answers_every_question(run_command: RunCommand, known_limits: PeakRates, tmp_path: Path) -> None:
    exit_code, output = run_command("bench", "--quick", "--seqlen", 16, "--seconds", 0.01, "--output", "results")
    assert exit_code == 0
    assert "measured FMA peak: 100 GFLOP/s" in output
    for question, workloads in quick_suite(16).items():
        report = json.loads((tmp_path / "results" / f"{question}.json").read_text())
        check_schema(report, question)
        assert {one["workload"]["label"] for one in report["measurements"]} == {one.label for one in workloads}
        assert (tmp_path / "results" / f"{question}.png").read_bytes().startswith(b"\x89PNG")
        assert all(workload.label in output for workload in workloads)


@deep  # the one-token form above runs below this tier
@pytest.mark.parametrize(
    ("question", "sizes"),
    [
        ("prefill", {"seqlen": 16}),
        ("decode", {"grouped_keys": 64, "keys": 32}),
        ("packed", {"longest": 64}),
        ("backward", {"seqlen": 64, "long": 128}),
        ("overhead", {}),
    ],
)
def test_a_question_is_answered_by_numbers_and_a_picture(
    question: str, sizes: dict[str, int], known_limits: PeakRates, tmp_path: Path
) -> None:
    sessions.run_question(question, QUESTIONS[question](**sizes), 0.0, tmp_path)
    measurements = json.loads((tmp_path / f"{question}.json").read_text())["measurements"]
    assert all(one["seconds"] is not None for one in measurements if one["peer"] == "fastattention")
    assert {one["peer"] for one in measurements} >= {"fastattention"}
    assert (tmp_path / f"{question}.png").stat().st_size > 0


@slow
def test_bench_measures_the_limits_of_this_machine(run_command: RunCommand, tmp_path: Path) -> None:
    arguments = ("--seqlen", 16, "--seconds", 0, "--threads", 1, "--output", "results")
    assert run_command("bench", "overhead", *arguments).exit_code == 0
    report = json.loads((tmp_path / "results" / "overhead.json").read_text())
    assert report["machine"]["num_threads"] == 1
    assert (report["limits"]["reason"] is None) == (report["limits"]["fma"] is not None)
    assert [path.name for path in sorted((tmp_path / "results").iterdir())] == ["overhead.json", "overhead.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("prefill --output /proc/results", "output='/proc/results' is no folder to write to"),
        ("prefil", "question 'prefil' is not known; choose from prefill, decode, packed, backward, overhead"),
        pytest.param("gpu --output .", "question 'gpu' needs a CUDA device, and torch sees none", marks=WITHOUT_GPU),
    ],
    ids=["output", "question", "gpu"],
)
def test_what_cannot_be_answered_is_told_before_anything_is_measured(
    arguments: str, message: str, run_command: RunCommand, tmp_path: Path
) -> None:
    exit_code, output = run_command("bench", *arguments.split())
    assert exit_code == 1
    assert f"error: {message}" in output
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_there_is_json_and_a_hint(
    run_command: RunCommand, known_limits: PeakRates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record.importlib.util, "find_spec", lambda name: None)
    exit_code, output = run_command("bench", "overhead", "--seqlen", 16, "--seconds", 0, "--output", "results")
    assert exit_code == 0
    assert "pip install '.[plot]' in the source tree" in output
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["overhead.json"]


def make_report(*measurements: Measurement, limits: PeakRates) -> BenchReport:
    machine = {"cpu": "CPU", "num_threads": 2, "versions": {"fastattention": "1", "torch": "2"}}
    return BenchReport(
        "prefill", "rate", machine, limits, {"fastattention": "1", "torch SDPA": "2"}, list(measurements)
    )


def test_speedup_and_fraction_are_those_of_the_medians() -> None:
    workload = BenchWorkload("decode", "float32", (1,), (1000,), 1, 1, 125)  # a megabyte
    ours = Measurement(workload, "fastattention", timing=Timing(1e-3, 1e-3, 1e-3, 3), max_error=0.0)
    peer = Measurement(workload, "torch SDPA", timing=Timing(5e-4, 4e-4, 9e-4, 3), max_error=0.0)
    assert ours.gbytes_per_s == pytest.approx(1.0)
    assert fraction_of_limit(ours, PeakRates(dram_read=4.0)) == pytest.approx(0.25)
    assert fraction_of_limit(ours, PeakRates(reason="unknown")) is None
    assert fastattention_speedup(peer, [ours, peer]) == pytest.approx(0.5)  # a loss stays visible
    assert fastattention_speedup(ours, [ours, peer]) is None
    report = make_report(ours, peer, limits=PeakRates(dram_read=4.0))
    assert [one["fastattention_speedup"] for one in report.to_json()["measurements"]] == [None, 0.5]


def test_quick_suite_is_a_smaller_full_suite() -> None:
    full, quick = full_suite(), quick_suite()
    assert list(quick) == list(full)
    for question, workloads in quick.items():
        assert len(workloads) <= len(full[question])
        assert sum(one.flops for one in workloads) <= sum(one.flops for one in full[question])
