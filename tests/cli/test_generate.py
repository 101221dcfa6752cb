"""`fastattention generate` with tiny models."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fastattention.cli import console
from fastattention.cli.choices import AttnImplementation, ModelDtype
from fastattention.cli.generation import Events, generate_tokens
from fastattention.cli.model_folder import LoadedModel, load_folder

from .conftest import RunCommand


def load(folder: Path, attention: AttnImplementation = AttnImplementation.EAGER) -> LoadedModel:
    return load_folder(folder, attention, ModelDtype.FLOAT32, "cpu")


@pytest.mark.parametrize("attention", list(AttnImplementation), ids=lambda attention: attention.value)
def test_generate_prints_the_prompt_its_continuation_and_both_speeds(
    attention: AttnImplementation, run_command: RunCommand, byte_model: Path
) -> None:
    loaded = load(byte_model)
    expected = loaded.codec.decode(generate_tokens(loaded, loaded.codec.encode("def f"), 12).tokens)
    arguments = ("--model", byte_model, "--prompt", "def f", "--attn", attention.value, "--max-new-tokens", 12)
    exit_code, output = run_command("generate", *arguments)
    assert exit_code == 0
    assert output.startswith("def f")
    assert " ".join(("def f" + expected).split()) in output
    assert f"{attention.value}: prompt of 6 tokens in" in output
    assert "tokens/s after the first" in output


def test_the_model_really_runs_with_the_chosen_attention(byte_model: Path) -> None:
    for attention in AttnImplementation:
        assert load(byte_model, attention).model.config._attn_implementation == attention.value


def test_events_tell_of_layers_then_of_tokens_then_of_text(byte_model: Path) -> None:
    loaded = load(byte_model)
    layers: list[float] = []
    counts: list[int] = []
    texts: list[str] = []
    events = Events(layers.append, counts.append, texts.append)
    made = generate_tokens(loaded, loaded.codec.encode("abc"), 5, min_new_tokens=5, events=events)
    assert layers == [0.5, 1.0]  # two layers, once: not again for every token
    assert counts == [1, 2, 3, 4, 5]
    assert "".join(texts) == loaded.codec.decode(made.tokens)
    assert made.prompt_tokens == 4
    assert made.prefill_seconds > 0
    assert made.decode_seconds > 0


def test_temperature_draws_from_torchs_generator(byte_model: Path) -> None:
    loaded = load(byte_model)
    prompt = loaded.codec.encode("abc")

    def draw(seed: int) -> list[int]:
        torch.manual_seed(seed)
        return generate_tokens(loaded, prompt, 12, min_new_tokens=12, temperature=5.0).tokens

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_a_folder_with_a_tokenizer_uses_it(byte_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(byte_model, folder)
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "hello": 7, "world": 9}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    codec = load(folder).codec
    assert codec.encode("hello world").tolist() == [[7, 9]]
    assert codec.decode([9, 7]) == "world hello"
    assert codec.decode(7) == "hello"


def test_bytes_need_no_tokenizer(byte_model: Path) -> None:
    codec = load(byte_model).codec
    assert codec.encode("né").tolist() == [[0, ord("n"), 0xC3, 0xA9]]
    assert codec.decode([0, ord("n"), 0xC3, 0xA9]) == "né"
    assert codec.decode([0xFF, ord("x")]) == "\N{REPLACEMENT CHARACTER}x"
    assert codec.decode(ord("n")) == "n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"--model": "nowhere"}, "error: model 'nowhere' is not a Transformers model folder: it has no config.json"),
        ({"--model": "org/name"}, "generate downloads nothing: `hf download org/name --local-dir FOLDER` fetches"),
        ({"--device": "nothing"}, "error: device='nothing' cannot be used"),
        ({"--max-new-tokens": 600}, "600 new ones are more than the 512 positions of the model"),
    ],
    ids=["model", "hub", "device", "length"],
)
def test_wrong_arguments_are_explained(
    arguments: dict[str, object], message: str, run_command: RunCommand, byte_model: Path
) -> None:
    options = {"--model": byte_model, "--prompt": "x", **arguments}
    exit_code, output = run_command("generate", *(part for option in options.items() for part in option))
    assert exit_code == 1
    assert message in output


@pytest.mark.parametrize("gpus", [0, 2])
@pytest.mark.parametrize("wrong", [("--device", "nothing"), ("--kv-budget", "1GiB")], ids=["device", "budget"])
def test_only_devices_that_are_there_are_advised(
    wrong: tuple[str, str], gpus: int, run_command: RunCommand, byte_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    exit_code, output = run_command("generate", "--model", byte_model, "--prompt", "x", *wrong)
    assert exit_code == 1
    assert ("cpu or cuda:0 or cuda:1" if gpus else "cpu") in output
    assert ("cuda:0" in output) == (gpus > 0)


def test_a_folder_without_tokenizer_and_without_bytes_is_explained(run_command: RunCommand, tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=257, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    exit_code, output = run_command("generate", "--model", "model", "--prompt", "x")
    assert exit_code == 1
    assert "error: model 'model' has no tokenizer" in output
    assert "its vocabulary of 257 is not the 256 bytes" in output


def test_missing_transformers_says_what_to_install(
    run_command: RunCommand, byte_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console.importlib.util, "find_spec", lambda name: None)
    for command in (("generate", "--model", byte_model, "--prompt", "x"), ("demo",)):
        exit_code, output = run_command(*command)
        assert exit_code == 1
        assert "pip install '.[transformers]' in the source tree" in output
