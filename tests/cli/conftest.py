"""A tiny byte-level model folder, and a way to run commands."""

from __future__ import annotations

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


@pytest.fixture
def run_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Finished]:
    """Runs `fastattention ARGUMENTS` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Finished:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
        return Finished(result.exit_code, " ".join(result.output.split()))

    return run


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights over bytes, without a tokenizer."""
    folder = tmp_path_factory.mktemp("byte_model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=0,
        # Logits are far apart, so that rounding does not decide which token is likeliest.
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
