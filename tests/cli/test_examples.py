"""The examples run, and compute what torch computes: each compares its own results with torch's."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from offload.fake_device import FakeDevice
from tiers import Tier, deep, slow, tier_of

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
    "train --steps=3 --seqlen=64": ["s per step", "largest difference of the losses: "],
    "lora --steps=3 --seqlen=64": ["57344 of 2877696 parameters are trained", "mean loss of the first ten steps"],
    "long_document --new-tokens=4": ["8188 tokens in chunks of 4096", "1500MiB allowed"],
    "batch_file --new-tokens=4": ["20 answers added to answers.jsonl, 0 were there"],
    "context_budget": ["needs an NVIDIA GPU" if not torch.cuda.is_available() else "those of a cache that keeps"],
}
SHORT = ("replace_sdpa", "linear_attention", "paged_cache", "flash_attn_unchanged")
# Forks of one process, since importing torch and Transformers takes longer than most examples.
PROGRAM = """
import os, runpy, sys, torch, transformers
examples, *commands = sys.argv[1:]
for command in commands:
    if os.fork() == 0:
        name, *options = command.split()
        sys.argv = [f"{examples}/{name}.py", *options]
        sys.stdout = sys.stderr = open(name, "w")
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def run(*command: str, **options: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # everything is small
    ran = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=240, **options
    )
    assert ran.returncode == 0, ran.stderr
    return ran


@slow
def test_every_example_runs_as_documented(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Below the deep tier those that need a second or two."""
    is_deep = tier_of(request.config) is Tier.DEEP
    commands = {one: texts for one, texts in PRINTED.items() if is_deep or one in SHORT}
    codes = map(int, run("-c", PROGRAM, str(EXAMPLES), *commands, cwd=tmp_path).stdout.split())
    for (command, texts), code in zip(commands.items(), codes, strict=True):
        name = command.split()[0]
        printed = (tmp_path / name).read_text()
        assert code == (name == "context_budget" and not torch.cuda.is_available()), printed
        for text in texts:
            assert text in printed
    if is_deep:
        assert float((tmp_path / "train").read_text().rpartition("largest difference of the losses: ")[2]) < 1e-4


@deep
def test_tensor_parallel_example_runs_on_two_ranks() -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    ran = run(*launcher, str(EXAMPLES / "tensor_parallel.py"))
    for rank in range(2):  # both write at once: a line may hold the words of both
        assert f"rank {rank} of 2: the output of the whole layer" in ran.stdout


def test_the_notebook_runs_as_far_as_it_needs_no_network(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads((EXAMPLES / "t4.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    programs = [compile(source, "t4.ipynb", "exec") for source in sources if source[0] not in "%!"]
    scope: dict[str, object] = {}
    for program in programs[:2]:  # without times, and without a model to download
        exec(program, scope)
    printed = capsys.readouterr().out
    assert "serves this call" in printed
    errors = [float(line.rpartition(" ")[2]) for line in printed.splitlines() if "largest error" in line]
    assert len(errors) == 2
    assert max(errors) < 1e-2


@pytest.fixture
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_one_thread")
def test_context_budget_example_keeps_layers_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLES / "context_budget.py"))
    example["main"]("cpu", device=FakeDevice(), hardware=PRESETS["v100"])
    assert "The tokens are those of a cache that keeps everything on the GPU." in capsys.readouterr().out


def test_every_example_is_short_and_tested() -> None:
    examples = {path.stem: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert set(examples) == {command.split()[0] for command in PRINTED}
    assert max(examples.values()) < 60
