"""The disassembler, and files of packages that pip fetches, kept in a folder of the user's cache.

CUDA 13's cuobjdump no longer reads Volta's machine code. The last one on PyPI that does is CUDA 12.8's, in a wheel of
Triton. Everything here needs Linux on x86-64.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import run_tool

from fastattention import environment
from fastattention.errors import CompileError

from .sass import Function, parse

TRITON = "triton==3.3.1"
_TRITON_FOLDER = "triton/backends/nvidia/bin/"
_LAST_FOR_VOLTA = 12  # major version of CUDA
# pip takes wheels for this platform, with any Python.
_PLATFORM = ("--python-version=3.11", "--implementation=cp", "--platform=manylinux_2_28_x86_64")


def cache_folder() -> Path:
    """The folder of downloaded tools and kernels, next to the folder of FASTATTENTION_CACHE."""
    return environment.kernel_cache().with_name("fastattention-volta")


def cuobjdump() -> Path:
    """The path of a cuobjdump that reads sm_70: the system's, or one that pip fetches. Raises CompileError."""
    found = shutil.which("cuobjdump")
    if found is not None and int(version(Path(found)).split(".")[0]) <= _LAST_FOR_VOLTA:
        return Path(found)
    path = cache_folder() / TRITON.replace("==", "-") / "cuobjdump"
    if not path.exists():
        with downloaded(TRITON) as wheel:
            for one in ("nvdisasm", "cuobjdump"):  # cuobjdump runs the nvdisasm beside it
                install(wheel.read(_TRITON_FOLDER + one), path.with_name(one), 0o755)
    return path


def version(tool: Path) -> str:
    """The release that a tool belongs to, for example "12.8"."""
    found = re.search(r"release (\d+\.\d+)", run_tool([str(tool), "--version"]))
    if found is None:
        raise CompileError(f"{tool} --version names no release")
    return found[1]


def disassemble(cubin: Path) -> list[Function]:
    """The functions of a cubin, with their resource usage. Raises CompileError when it cannot be read."""
    return parse(run_tool([str(cuobjdump()), "-sass", "--dump-resource-usage", str(cubin)]))


@contextmanager
def downloaded(requirement: str) -> Iterator[zipfile.ZipFile]:
    """The wheel of "name==version", deleted afterwards. Raises CompileError with pip's answer when there is none."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:  # the system's temporary folder may be small
        options = ["--no-deps", "--only-binary=:all:", *_PLATFORM, "--progress-bar=off", "--quiet", "--dest", place]
        run_tool([sys.executable, "-m", "pip", "download", *options, requirement])
        (wheel,) = Path(place).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            yield archive


def install(content: bytes, path: Path, mode: int = 0o644) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    Path(file.name).chmod(mode)
    Path(file.name).replace(path)
