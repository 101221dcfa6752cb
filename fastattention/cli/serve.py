"""`fastattention serve`: checks the model's name, and lets the Transformers integration serve it."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path

from transformers.utils.import_utils import is_serve_available

from fastattention.cli.console import MESSAGES, OUTPUT, check_model_folder
from fastattention.errors import ArgumentError, UnsupportedError
from fastattention.sizes import read_bytes

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?(:[\w./-]+)?", re.ASCII)  # with a revision, or a GGUF file


def serve(
    model: str, host: str, port: int, kv_memory: str | None, grace_seconds: float, options: Sequence[str]
) -> None:
    """Serves until SIGINT or SIGTERM. kv_memory: a size, e.g. 8GiB; options: those of `transformers serve`."""
    memory = None if kv_memory is None else read_bytes("--kv-memory", kv_memory)
    if not is_serve_available():
        raise UnsupportedError("the server's packages are not installed: pip install 'fastattention[serve]'")
    _check_model(model)

    from fastattention.integrations.transformers.serving import server

    announce, warn = (functools.partial(one.print, markup=False, soft_wrap=True) for one in (OUTPUT, MESSAGES))
    server.serve(model, host, port, memory, grace_seconds, options, announce, warn)


def _check_model(model: str) -> None:
    """Checks a model's name before the hub is asked for it."""
    folder = Path(model)
    if model and folder.is_dir():
        check_model_folder(folder)
    elif folder.exists() or not HUB_NAME.fullmatch(model):
        raise ArgumentError(f"model {model!r} is neither a folder nor a name on the hub, such as org/name")
