"""Where Triton-Ascend or LLVM 19 are missing, modules of this folder are skipped and say so. vendor/ needs neither."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from conformance.threads import one_torch_thread

from ascend.llvm import TOOLS, find_tool

HERE = Path(__file__).parent
NEEDS_NEITHER = ("test_on_device.py", "test_source.py")


def _missing() -> list[str]:
    packages = ("triton", "triton.backends.ascend") if importlib.util.find_spec("triton") else ("triton",)
    has_triton_ascend = all(importlib.util.find_spec(package) for package in packages)
    return [*([] if has_triton_ascend else ["triton-ascend"]), *(tool for tool in TOOLS if find_tool(tool) is None)]


class _SkippedModule(pytest.Module):
    """A module that is not imported."""

    def collect(self) -> list[pytest.Item]:
        reason = f"needs triton-ascend and LLVM 19; {', '.join(_missing())} not found: run `make test-ascend`"
        raise pytest.skip.Exception(reason, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if module_path.parent != HERE or module_path.name in NEEDS_NEITHER or not _missing():
        return None
    return _SkippedModule.from_parent(parent, path=module_path)


@pytest.fixture(scope="package", autouse=True)
def one_thread_for_torch() -> Iterator[None]:
    with one_torch_thread():
        yield
