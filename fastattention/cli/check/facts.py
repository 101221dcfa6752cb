"""Facts about the machine for a report: all of `fastattention info`, the devices, and their vendor's tool."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.cli.info import environment_variables
from fastattention.cli.machine import describe_machine

TOOLS = {"npu": ("npu-smi", "info"), "cuda": ("nvidia-smi",)}
TOOL_SECONDS = 60
OF_A_RUN = ("command", "load_average")  # left out of describe_machine: they may hold files and addresses
# Beginnings of the names of distributions that compile or run kernels.
DISTRIBUTIONS = ("torch", "triton", "cuda-", "nvidia-cuda-nvrtc", "nvidia-cudnn", "transformers")
# Files below the folder that CANN's set_env.sh names.
CANN_VERSIONS = ("version.cfg", "*/ascend_toolkit_install.info")


def facts_of(device: str) -> dict[str, Any]:
    """All facts, as JSON types only. device: npu, cuda or cpu."""
    return {
        "device": device,
        "device_names": device_names(device),
        "machine": {name: value for name, value in describe_machine().items() if name not in OF_A_RUN},
        "distributions": installed(),
        "backends": {name: state_of(name) for name in ATTENTION_BACKENDS.order},
        "environment": {name: os.environ.get(name) for name in environment_variables()},
        "tool": tool_output(device),
        "cann": cann_versions(),
    }


def device_names(device: str) -> list[str]:
    """Names of all devices that torch sees; GPUs with their compute capability."""
    if device == "cuda":
        indices = range(torch.cuda.device_count())
        pairs = ((torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)) for index in indices)
        return [f"{name}, sm{major}{minor}" for name, (major, minor) in pairs]
    if device == "npu":
        npu = torch.npu  # type: ignore[attr-defined]  # torch_npu adds it
        return [npu.get_device_name(index) for index in range(npu.device_count())]
    return []


def state_of(name: str) -> dict[str, str]:
    """A backend's own description, or why it cannot run."""
    backend = ATTENTION_BACKENDS.get(name)
    reason = backend.why_unavailable()
    return {"available": backend.describe()} if reason is None else {"unavailable": reason}


def installed() -> dict[str, str]:
    """Versions of distributions that compile or run kernels."""
    found = {one.metadata["Name"] or "": one.version for one in distributions()}
    return {name: found[name] for name in sorted(found) if name.lower().startswith(DISTRIBUTIONS)}


def tool_output(device: str) -> dict[str, str] | None:
    """The output of the vendor's tool, without its list of processes; None where there is no such tool."""
    command = TOOLS.get(device)
    if command is None or shutil.which(command[0]) is None:
        return None
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS)
        printed = ran.stdout + ran.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        printed = f"cannot be run: {error}"
    lines = printed.splitlines()
    processes = next((number for number, line in enumerate(lines) if "Process" in line), len(lines))
    return {"command": " ".join(command), "output": "\n".join(lines[:processes])}


def cann_versions() -> dict[str, str]:
    """Contents of CANN's version files, by name; empty where CANN is not set up."""
    folder = os.environ.get("ASCEND_TOOLKIT_HOME")
    if not folder:
        return {}
    found = (path for pattern in CANN_VERSIONS for path in sorted(Path(folder).glob(pattern)))
    return {str(path.relative_to(folder)): path.read_text(errors="replace") for path in found}
