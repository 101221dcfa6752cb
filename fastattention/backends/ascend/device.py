"""What torch_npu says of this machine: whether there is an NPU, what it calls itself, and which CANN it runs on."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re

import torch


@functools.cache
def why_no_npu() -> str | None:
    """Why there is no NPU to run on, or None. Imports torch_npu."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed; an Ascend server needs CANN and torch_npu, see docs/guides/ascend.md"
    try:
        importlib.import_module("torch_npu")
    except Exception as error:  # the vendor's libraries may raise anything when CANN is missing or too old
        return f"torch_npu cannot be imported: {error}"
    if not torch.npu.is_available():  # type: ignore[attr-defined]
        return "torch_npu sees no NPU"
    return None


@functools.cache
def device_name(index: int) -> str:
    """What an NPU calls itself, such as Ascend910B2."""
    name: str = torch.npu.get_device_name(index)  # type: ignore[attr-defined]
    return name


@functools.cache
def cann_major() -> int:
    """The major version of CANN, such as 8 or 9; 0 where torch_npu does not know it."""
    version: str = torch.npu.utils.get_cann_version()  # type: ignore[attr-defined]
    found = re.match(r"\d+", version)
    return 0 if found is None else int(found.group())
