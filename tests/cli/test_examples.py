"""The examples run, and compute what torch computes: each compares its own results with torch's."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from offload.fake_device import FakeDevice
from tiers import slow

from fastattention.offload.hardware import PRESETS

EXAMPLES = Path(__file__).parents[2] / "examples"
PRINTED = {
    "replace_sdpa": ["largest difference", "serves this call"],
    "transformers_generate": ["self.items", "The tokens are those of eager attention."],
    "linear_attention": ["each new token", "The tokens are those of torch's operations."],
    "paged_cache": ["sequence 0: 57 tokens", "sequence 1: 25 tokens"],
    "tensor_parallel": ["rank 0 of 1"],
    "serve": ["8 prompts at once: the tokens are those of eager attention"],
    "flash_attn_unchanged": ["sequence 0: 60 tokens", "40 rows of padding are 0"],
}


@pytest.fixture
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # everything is small
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120)


@slow
@pytest.mark.parametrize("name", PRINTED)
def test_example_runs_as_documented(name: str) -> None:
    ran = run(str(EXAMPLES / f"{name}.py"))
    assert ran.returncode == 0, ran.stderr
    for text in PRINTED[name]:
        assert text in ran.stdout


def test_training_example_has_the_losses_of_sdpa() -> None:
    ran = run(str(EXAMPLES / "train.py"), "--steps", "3", "--seqlen", "64")
    assert ran.returncode == 0, ran.stderr
    assert "s per step" in ran.stdout
    assert float(ran.stdout.rpartition("largest difference of the losses: ")[2]) < 1e-4


def test_tensor_parallel_example_runs_on_two_ranks() -> None:
    ran = run(
        "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(EXAMPLES / "tensor_parallel.py")
    )
    assert ran.returncode == 0, ran.stderr
    for rank in range(2):  # both write at once: a line may hold the words of both
        assert f"rank {rank} of 2: the output of the whole layer" in ran.stdout


@pytest.mark.usefixtures("_one_thread")
def test_context_budget_example_keeps_layers_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLES / "context_budget.py"))
    example["main"]("cpu", device=FakeDevice(), hardware=PRESETS["v100"])
    assert "The tokens are those of a cache that keeps everything on the GPU." in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_long_context_example_says_that_it_needs_a_gpu() -> None:
    ran = run(str(EXAMPLES / "context_budget.py"))
    assert ran.returncode == 1
    assert "needs an NVIDIA GPU" in ran.stderr


def test_every_example_is_short_and_tested() -> None:
    examples = {path.stem: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert set(examples) == {*PRINTED, "context_budget", "train"}
    assert max(examples.values()) < 60
