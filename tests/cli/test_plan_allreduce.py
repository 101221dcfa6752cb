"""`fastattention plan allreduce`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from fastattention.cli.plan.allreduce import COLUMNS

from .conftest import RunCommand

LLAMA = "plan allreduce --model llama-2-70b --tp 4 --seqlen 2048 --batch 8".split()
PASSED_ON = "plan allreduce --model llama-2-7b --tp 2 --seqlen 2048 --batch 8".split()
SHORT = "plan allreduce --model llama-2-7b --tp 4 --seqlen 256".split()


def test_plan_says_what_it_predicts(run_command: RunCommand) -> None:
    exit_code, output = run_command(*LLAMA)
    assert exit_code == 0
    for said in (
        "llama-2-70b on 4 x h200, 8 x 2048 tokens",
        "attention 500 TFLOPS, product 680",
        "1.33 ms, 256.00 MiB by ring_product",
        "blocks 2, of 2 x 8192 rows; attention of all rows at once",
        "predicted serial 2.31 ms",
        "predicted in blocks 1.8 ms, 1.28x",
        "48% hidden, 694 us exposed",
        "compute 14% longer",
        "c10d 2.31 ms 4 1.94 ms 1.19x 30% peer_kernel 2.41 ms 1 2.41 ms 1.00x 0%",
        "ring_product 2.44 ms 2 1.8 ms 1.35x 48% chosen",
        "Every time is predicted from rates",
    ):
        assert said in output


def test_bars_show_which_block_runs_when(run_command: RunCommand) -> None:
    """The width is the serial time; a numeral is a block, and its all-reduce begins where its compute ends."""
    _, output = run_command(*LLAMA, "--hardware", "ascend-910b")
    serial, blocks = output[output.index(" serial compute") :].split(" blocks compute ")
    compute, communication = serial.removeprefix(" serial compute ").split(" all-reduce ")
    assert set(compute + communication.strip()) == {"1"}
    assert len(compute + communication.strip()) == COLUMNS
    compute, communication = blocks.split(" Transports")[0].split(" all-reduce ")
    for lane in (compute, communication.replace(" ", "")):
        assert [numeral for numeral, _ in groupby(lane)] == list("12345678")
    assert len(compute) < COLUMNS * 0.8


def test_blocks_that_go_round_are_drawn_step_by_step(run_command: RunCommand) -> None:
    _, output = run_command(*PASSED_ON)
    assert "by ring_product" in output
    assert "blocks 4, of 4 x 4096 rows; attention of all rows at once" in output
    compute, communication = output.split(" blocks compute ")[1].split(" Transports")[0].split(" all-reduce ")
    for lane in (compute, communication):
        assert [numeral for numeral, _ in groupby(lane.replace(" ", ""))] == list("12132434")


def test_a_block_too_short_for_a_column_has_one(run_command: RunCommand) -> None:
    _, output = run_command(*LLAMA, "--hardware", "v100-pcie", "--batch", 1, "--tp", 8, "--seqlen", 32768)
    compute = output.split(" blocks compute ")[1].split(" all-reduce ")[0]
    assert [numeral for numeral, _ in groupby(compute)] == list("12345678")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--tp 8 --hardware ascend-910b", "llama-2-70b on 8 x ascend-910b"),
        ("--hardware v100-pcie", "attention 35 TFLOPS, product 83"),
        ("--model pangu-38b", "pangu-38b on 4 x h200"),
        ("--batch 1", "1 x 2048 tokens"),
        ("--seqlen 4096", "512.00 MiB by"),
    ],
)
def test_options_are_heeded(arguments: str, said: str, run_command: RunCommand) -> None:
    exit_code, output = run_command(*LLAMA, *arguments.split())
    assert exit_code == 0
    assert said in output


def test_a_short_prompt_is_not_divided(run_command: RunCommand) -> None:
    exit_code, output = run_command(*SHORT)
    assert exit_code == 0
    assert "blocks 1: more would gain too little" in output
    assert "hidden," not in output
    assert "blocks compute" not in output


@pytest.mark.parametrize(
    ("question", "name", "begins"),
    [(LLAMA, "plan.svg", b"<?xml"), (SHORT, "[plan].PNG", b"\x89PNG")],
    ids=["blocks", "serial"],
)
def test_plan_draws_the_timeline(
    question: list[str], name: str, begins: bytes, run_command: RunCommand, tmp_path: Path
) -> None:
    exit_code, output = run_command(*question, "--output", name)
    assert exit_code == 0
    assert f"picture: {name}" in output
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_the_picture_says_that_it_is_predicted(run_command: RunCommand, tmp_path: Path) -> None:
    run_command(*LLAMA, "--output", "plan.svg")
    drawn = (tmp_path / "plan.svg").read_text()
    for said in ("predicted, not measured", "blocks: all-reduce", "serial: compute"):
        assert said in drawn
