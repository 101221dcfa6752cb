"""`fastattention plan traffic` and benchmarks/memory_traffic.py."""

from __future__ import annotations

import pytest
import torch
import typer

from .conftest import RunCommand
from .test_scripts import load_script


def test_plan_says_what_it_predicts(run_command: RunCommand) -> None:
    exit_code, output = run_command(*"plan traffic --seqlen 16384 --heads 32 --heads-k 8 --causal".split())
    assert exit_code == 0
    for said in (
        "1 x 16384 queries, 16384 keys, float16, causal",
        "32 of queries, 8 of keys, head dimension 128",
        "H100: 132 SMs, L2 cache 50.00 MiB",
        "forward, 128 rows a CTA, 264 CTAs at a time",
        "read 1.19 times",
        "as tiled 203.88 MiB 128.00 MiB 331.88 MiB 1.04x",
        "standard attention 32.19 GiB 32.12 GiB 64.31 GiB 205.80x",
        "N^2 d^2 / M 2.28 MiB",
        "M = 112.39 MiB",
        "Every number is predicted. An H200 moved as much within 15% in six calls of eight",
    ):
        assert said in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--seqlen 524288 --heads 1", "read 16.00 times"),
        ("--seqlen 524288 --heads 1 --causal", "read 8.27 times"),
        ("--seqlen 32768 --seqlen-q 1 --heads-k 8 --batch 8", "as tiled 1.00 GiB 64.00 KiB 1.00 GiB 1.00x"),
        ("--seqlen 4096 --gpu V100 --dtype bfloat16", "V100: 80 SMs, L2 cache 6.00 MiB"),
        ("--seqlen 134217728 --causal", "read 1"),
    ],
    ids=["long", "causal", "decode", "volta", "longest"],
)
def test_plan_serves_every_kind_of_call(arguments: str, said: str, run_command: RunCommand) -> None:
    exit_code, output = run_command("plan", "traffic", *arguments.split())
    assert exit_code == 0
    assert said in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--gpu B300", "gpu='B300' is not known; choose from P100, GTX 1080, V100, T4, A100, RTX 3090, RTX 4090, H100"),
        ("--headdim 513", "headdim=513 is not served; use 1 to 512"),
        ("--heads 8 --heads-k 3", "heads_k=3 does not divide heads=8"),
    ],
)
def test_plan_refuses_what_it_cannot_do(arguments: str, message: str, run_command: RunCommand) -> None:
    exit_code, output = run_command("plan", "traffic", "--seqlen", 1024, *arguments.split())
    assert exit_code == 1
    assert output == f"error: {message}"


def test_script_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(typer.Exit):
        load_script("memory_traffic").main()
