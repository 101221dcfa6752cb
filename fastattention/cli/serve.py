"""`fastattention serve`: checks what was given, and lets the Transformers integration serve the model."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

from fastattention import environment
from fastattention.cli.console import MESSAGES, OUTPUT, check_model_folder
from fastattention.errors import ArgumentError, UnsupportedError
from fastattention.sizes import read_bytes

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?", re.ASCII)  # with a revision
PACKAGES = ("starlette", "uvicorn", "pydantic", "prometheus_client", "llguidance", "jinja2", "psutil")  # the extra


def serve(
    *,
    model: str,
    name: str | None,
    host: str,
    port: int,
    device: str | None,
    dtype: str,
    kv_memory: str | None,
    cpu_kv_memory: str | None,
    grace_seconds: float,
    api_key: str | None,
    max_request_bytes: str,
    max_waiting: int,
    tool_format: str,
    trust_remote_code: bool,
) -> None:
    """Serves until SIGINT or SIGTERM. kv_memory, cpu_kv_memory, max_request_bytes: sizes, e.g. 8GiB."""
    memory = None if kv_memory is None else read_bytes("--kv-memory", kv_memory)
    host_memory = 0 if cpu_kv_memory is None else read_bytes("--cpu-kv-memory", cpu_kv_memory)
    request_bytes = read_bytes("--max-request-bytes", max_request_bytes)
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise UnsupportedError(
            f"the server's packages are not installed ({', '.join(missing)}): pip install 'fastattention[serve]'"
        )
    for option, text in (("--name", name), ("--api-key", api_key)):
        if text is not None and not (text and text.isprintable()):
            raise ArgumentError(f"{option} must be characters that can be printed, at least one; got {text!r}")
    _check_model(model)

    from fastattention.cli.model_folder import check_device
    from fastattention.integrations.transformers.serving import server
    from fastattention.integrations.transformers.serving.app import Limits

    if device is not None:
        check_device(device)
    announce, warn = (functools.partial(one.print, markup=False, soft_wrap=True) for one in (OUTPUT, MESSAGES))
    limits = Limits(api_key or environment.api_key(), request_bytes, max_waiting)
    settings = server.Settings(
        model=model, name=name, host=host, port=port, device=device, dtype=dtype, kv_memory=memory,
        cpu_kv_memory=host_memory, grace_seconds=grace_seconds, trust_remote_code=trust_remote_code,
        tool_format=tool_format, limits=limits,
    )  # fmt: skip
    server.serve(settings, announce, warn)


def _check_model(model: str) -> None:
    """Checks a model's name before the hub is asked for it."""
    folder = Path(model)
    if model and folder.is_dir():
        check_model_folder(folder)
    elif folder.exists() or not HUB_NAME.fullmatch(model):
        raise ArgumentError(f"model {model!r} is neither a folder nor a name on the hub, such as org/name")
