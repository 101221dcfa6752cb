"""A tiny byte-level model folder, and a way to run commands."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from fastattention.cli.main import app


class Finished(NamedTuple):
    """The result of a command; all white space of the output is single spaces, so that line breaks do not matter."""

    exit_code: int
    output: str


RunCommand = Callable[..., Finished]


@pytest.fixture
def run_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunCommand:
    """Runs `fastattention ARGUMENTS` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Finished:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
        return Finished(result.exit_code, " ".join(result.output.split()))

    return run


class HostEvent:
    """An event of a processor as if it were a device."""

    clock = staticmethod(time.perf_counter)

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = self.clock()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: HostEvent) -> float:
        return (end.at - self.at) * 1e3


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights over bytes, without a tokenizer."""
    folder = tmp_path_factory.mktemp("byte_model")
    torch.manual_seed(0)
    # The range of weights makes logits far apart: rounding must not decide which token is likeliest.
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=0, initializer_range=0.5,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
