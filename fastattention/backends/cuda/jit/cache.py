"""Cubins on disk: those that came with the package, and those compiled here.

A file's name is a hash of everything its content depends on, so a file is never out of date and never overwritten with
something else. Files appear under their names complete or not at all, so any number of processes may share a folder.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from pathlib import Path

from fastattention import config
from fastattention.backends.cuda.heuristics import KernelConfig
from fastattention.backends.cuda.jit import compiler

BUILT_AHEAD = Path(__file__).parents[1] / "cubins"


@functools.cache
def source_hash() -> str:
    """Hash of every file a kernel may include, with its name."""
    digest = hashlib.sha256(compiler.SOURCE.encode())
    for folder in compiler.INCLUDE_FOLDERS:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in (".h", ".hpp", ".cuh")):
            digest.update(path.relative_to(folder).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _file_name(kernel: KernelConfig, target: int, *more: str) -> str:
    content = "\n".join([source_hash(), *compiler.options(kernel, target), *more])
    return f"{kernel.name}_on_sm{target}_{hashlib.sha256(content.encode()).hexdigest()[:24]}.cubin"


def built_ahead_path(kernel: KernelConfig, target: int) -> Path:
    """Where the package keeps this cubin when it was built ahead, by whichever compiler."""
    return BUILT_AHEAD / _file_name(kernel, target)


def cached_path(kernel: KernelConfig, target: int) -> Path:
    """Where this machine keeps this cubin as its compiler makes it."""
    numbers = ".".join(map(str, compiler.version()))
    return config.kernel_cache() / _file_name(kernel, target, numbers)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file that others see complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def cubin(kernel: KernelConfig, target: int) -> bytes:
    """The machine code of a variant: built ahead, from the cache, or compiled now and cached."""
    ahead = built_ahead_path(kernel, target)
    if ahead.exists():
        return ahead.read_bytes()
    path = cached_path(kernel, target)
    if path.exists():
        return path.read_bytes()
    code = compiler.compile_kernel(kernel, target).code
    write_atomically(path, code)
    return code
