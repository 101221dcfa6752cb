"""What the scripts share: where their figures go, how these are shown, other programs, and calls to time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.markdown import Markdown
from torch import Tensor

from fastattention.cli.bench.record import write_record
from fastattention.cli.console import OUTPUT
from fastattention.errors import CompileError

RESULTS = Path(__file__).parent / "results"


def publish(path: Path, figures: Mapping[str, Any], *blocks: str, draw: Callable[[Path], object] | None = None) -> None:
    """Print `blocks` of Markdown, which a module of pages/ makes of the figures, and write these to `path`.

    draw: as for `write_record`
    """
    show(*blocks)
    write_record(path, figures, draw)


def show(*blocks: str) -> None:
    """Print headings, text and tables in Markdown, which a terminal shows rendered and a file as it is."""
    for block in blocks:
        if OUTPUT.is_terminal:
            OUTPUT.print(Markdown(block))
        else:
            print(block, end="\n\n")


def run_tool(command: Sequence[str], folder: Path | None = None, text: str | None = None) -> str:
    """The output of a program, run in `folder` with `text` as its input.

    Raises CompileError when there is no such program, and with its error message when it fails.
    """
    try:
        done = subprocess.run(command, cwd=folder, input=text, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise CompileError(f"{command[0]} is not installed") from error
    if done.returncode != 0:
        raise CompileError(f"{' '.join(command[:4])} ... fails: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def run_again(script: str, *arguments: str, **environment: str) -> Any:
    """What a script prints as its last line in a process of its own, as JSON; None where it prints nothing."""
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, check=True, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if lines else None


def heads_first(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A function of torch, which takes heads before tokens, of tensors with tokens before heads, as ours take them."""
    return attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def without_grad(forward: Callable[..., Tensor], *tensors: Tensor) -> Callable[[], object]:
    """A call of `forward` that records no gradients."""

    def call() -> object:
        with torch.no_grad():
            return forward(*tensors)

    return call


def with_gradients(forward: Callable[..., Tensor], *tensors: Tensor, grad: Tensor) -> Callable[[], object]:
    """A call of `forward` and its backward. grad: the gradient of the result."""
    given = [x.clone().requires_grad_() for x in tensors]
    return lambda: torch.autograd.grad(forward(*given), given, grad)
