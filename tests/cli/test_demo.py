"""`fastattention demo`: one real run with a small model, and its errors."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiers import deep, slow

from fastattention.cli import demo, main
from fastattention.cli.console import check_model_folder
from fastattention.cli.demo_messages import DemoRequest, Result

from .conftest import RunCommand


@slow
def test_demo_compares_three_implementations(run_command: RunCommand, byte_model: Path, tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("".join(f"line_{index} = {index}\n" for index in range(40)))
    arguments = ("--file", source, "--context", 300, "--new-tokens", 8, "--model", byte_model)
    exit_code, output = run_command("demo", *arguments)
    assert exit_code == 0, output
    prompt = demo.read_context(source, 300)
    assert f"{len(prompt) + 1} tokens of context, 8 new tokens, float32" in output
    assert output.count(" yes ") == 2
    assert all(f" {name} " in output for name in ("eager", "sdpa", "fast_attention"))
    assert output.count(" MB ") == 3
    assert prompt.splitlines()[-1] in output


def make_result(attention: str, *tokens: int) -> Result:
    return Result(attention, list(tokens), "text", 10, 1.0, 0.5, 2_000_000)


def patch_turns(monkeypatch: pytest.MonkeyPatch, make: Callable[[str, int], Result]) -> list[str]:
    """Has demo get the results of `make`, from an implementation and its turn. Returns the order of turns."""
    order: list[str] = []

    @contextmanager
    def worker(request: DemoRequest) -> Iterator[demo.Turn]:
        def turn(on_progress: Callable[[float], None]) -> Result:
            order.append(request.attention)
            return make(request.attention, order.count(request.attention))

        yield turn

    monkeypatch.setattr(demo, "worker", worker)
    return order


def test_implementations_take_turns_and_medians_are_shown(
    run_command: RunCommand, byte_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(attention: str, turn: int) -> Result:
        seconds = {1: 1.0, 2: 7.0, 3: 1.1}[turn] if attention == "sdpa" else 1.0
        return dataclasses.replace(make_result(attention, 1, 2), prefill_seconds=seconds)

    order = patch_turns(monkeypatch, make)
    output = run_command("demo", "--model", byte_model, "--context", 200).output
    names = ["eager", "sdpa", "fast_attention"]
    assert order == [*names, *reversed(names), *names]
    assert "medians of 3 turns" in output
    assert "sdpa yes 1.10 s" in output
    assert "The machine is busy: the same work took up to 5.0x as long in another turn" in output


def test_long_rounds_are_measured_once_and_quiet_machines_are_not_blamed(
    run_command: RunCommand, byte_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "LONG_SECONDS", 0.0)
    order = patch_turns(monkeypatch, lambda attention, _: make_result(attention, 1, 2))
    output = run_command("demo", "--model", byte_model, "--context", 200).output
    assert len(order) == 3
    assert "measured once" in output
    assert "busy" not in output


def test_demo_fails_when_tokens_differ(
    run_command: RunCommand, byte_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = {"eager": (1, 2, 3), "sdpa": (1, 2, 3), "fast_attention": (1, 2, 4)}
    patch_turns(monkeypatch, lambda attention, _: make_result(attention, *tokens[attention]))
    exit_code, output = run_command("demo", "--model", byte_model, "--context", 200)
    assert exit_code == 1
    assert "not from 2" in output
    assert "error: the implementations chose different tokens" in output


def test_unmeasurable_memory_is_said(
    run_command: RunCommand, byte_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmeasured = dataclasses.replace(make_result("any", 1, 2), extra_bytes=None)
    patch_turns(monkeypatch, lambda attention, _: dataclasses.replace(unmeasured, attention=attention))
    assert run_command("demo", "--model", byte_model, "--context", 200).output.count("not measurable here") == 3


def test_without_the_source_tree_it_says_where_the_model_is(run_command: RunCommand) -> None:
    exit_code, output = run_command("demo")
    assert exit_code == 1
    assert "model 'examples/demo_model' is not a Transformers model folder" in output
    assert "run `make demo` in the source tree, or name a Transformers model folder with --model" in output


def test_the_source_tree_has_the_model() -> None:
    """`make demo` runs the command there."""
    default = inspect.signature(main.demo).parameters["model"].default
    check_model_folder(Path(__file__).parents[2] / default)


@deep
def test_the_workers_error_is_shown(run_command: RunCommand, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    exit_code, output = run_command("demo", "--model", tmp_path, "--context", 200)
    assert exit_code == 1
    assert "error: eager: model" in output
    assert "cannot be loaded" in output


def test_context_ends_with_a_complete_line(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("first line\nsecond line\nthird line\n")
    assert demo.read_context(source, 25) == "first line\nsecond line\n"
    assert demo.read_context(source, 23) == "first line\nsecond line\n"
    assert demo.read_context(source, 4) == "firs"


@pytest.mark.parametrize(
    ("name", "message"),
    [("missing.py", "cannot be read: No such file"), ("short.py", "has 5 bytes; the context wants 100")],
)
def test_an_unusable_file_is_explained(
    name: str, message: str, run_command: RunCommand, byte_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "short.py").write_text("x = 1")
    exit_code, output = run_command("demo", "--model", byte_model, "--file", tmp_path / name, "--context", 100)
    assert exit_code == 1
    assert message in output


def test_the_default_file_is_long_enough() -> None:
    assert len(demo.read_context(demo.DEFAULT_SOURCE, 6000)) > 5000
