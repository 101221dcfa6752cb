"""`fastattention plan` and benchmarks/ascend_plan.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiers import deep, slow

from fastattention.backends.ascend.chips import CHIPS

from .conftest import RunCommand
from .test_scripts import load_script


def test_plan_says_what_it_predicts(run_command: RunCommand) -> None:
    exit_code, output = run_command("plan", "ascend", "--seqlen", 4096, "--heads", 4, "--causal")
    assert exit_code == 0
    for said in (
        "910B2: 24 AI Cores",
        "outer tile (Cube)",
        "predicted latency",
        "of the peak",
        "4194304 bytes at any length",
        "L0A",
        "UB",
        "unified tiling",
        "two-level tiling",
        "+ deeper preload",
        "+ tiling-mask: hidden tiles skipped",
        "+ tiling-mask: no full mask read",
        "number of synchronizations",
        "cores without work",
        "Vector MTE3",
        "no Ascend device has run this",
    ):
        assert said in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--seqlen 4096", "Without a mask there is nothing for the tiling-mask"),
        ("--seqlen 65536 --seqlen-q 1 --heads 32 --heads-k 8", "24, splits of the keys 3"),
        ("--seqlen 134217728 --seqlen-q 1 --heads 100000 --heads-k 1", "predicted rate"),
        pytest.param("--seqlen 100000000 --causal --heads 32", "predicted rate", marks=slow),
        ("--seqlen 100 --dtype float32 --headdim 256 --chip Ascend910B4", "910B4: 20 AI Cores at 1.5 GHz"),
        ("--seqlen 512 --batch 2 --heads 4 --dtype bfloat16 --headdim 40", "predicted rate"),
        ("--seqlen 2048 --chip a3", "910_9392 (910C, one die of 2): 24 AI Cores at 1.85 GHz"),
    ],
    ids=["no mask", "decode", "heads", "long", "float32", "batch", "A3"],
)
def test_plan_serves_every_kind_of_call(arguments: str, said: str, run_command: RunCommand) -> None:
    exit_code, output = run_command("plan", "ascend", *arguments.split())
    assert exit_code == 0
    assert said in output


@pytest.mark.parametrize(
    ("name", "begins"), [("plan.svg", b"<?xml"), pytest.param("[plan].PNG", b"\x89PNG", marks=slow)]
)
def test_plan_draws_the_timeline(name: str, begins: bytes, run_command: RunCommand, tmp_path: Path) -> None:
    exit_code, output = run_command("plan", "ascend", "--seqlen", 2048, "--output", name)
    assert exit_code == 0
    assert f"timeline: {name}" in output
    assert (tmp_path / name).read_bytes().startswith(begins)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--chip A100",
            "chip='A100' is not known; choose from 910B1, 910B2, 910B3, 910B4, 910B4-1, 910_9362, 910_9372, "
            "910_9382, 910_9392, 910B2C, 910_9381, 910_9391, 910C, A3",
        ),
        ("--dtype int8", "dtype='int8' is not known; choose from float16, bfloat16, float32"),
        ("--headdim 257", "headdim=257 is not served by the ascend backend; use 1 to 256"),
        ("--heads 8 --heads-k 3", "heads_k=3 does not divide heads=8"),
        ("--output plan.pdf", "output='plan.pdf' has no suffix of a picture; use .png or .svg"),
        ("--output nowhere/plan.png", "output='nowhere/plan.png' cannot be written: No such file or directory"),
    ],
)
def test_plan_refuses_what_it_cannot_do(arguments: str, message: str, run_command: RunCommand) -> None:
    exit_code, output = run_command("plan", "ascend", "--seqlen", 1024, *arguments.split())
    assert exit_code == 1
    assert output == f"error: {message}"


@deep
def test_script_writes_predictions_and_both_timelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, chips = load_script("ascend_plan"), {name: CHIPS[name] for name in ("910B2", "910_9382", "910_9392")}
    monkeypatch.setattr(script, "CHIPS", chips)
    script.main(longest=2048, output=tmp_path)
    record = json.loads((tmp_path / "ascend_plan.json").read_text())
    assert "predicted" in record["note"]
    assert {"commit", "command", "versions"} <= set(record["machine"])
    assert [one["seqlen"] for one in record["validation"]] == [1024 << step for step in range(6)]
    assert all(abs(one["error"]) <= one["allowed_error"] for one in record["validation"])
    assert [one["seqlen"] for one in record["gains"]] == [1024, 2048]
    assert {one["tiling_mask_bytes"] for one in record["mask"]} == {4 * 2**20}
    assert {one["chip"] for one in record["best"]} == set(chips)
    for name in ("unified", "two_level"):
        assert (tmp_path / f"ascend_plan_{name}.png").read_bytes().startswith(b"\x89PNG")
