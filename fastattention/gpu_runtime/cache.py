"""The cache of cubins on disk: cubins that came with the package, and cubins compiled here.

A file's name is a hash of everything its content depends on, so a file is never out of date and never overwritten with
something else. Files appear under their names complete or not at all, so any number of processes may share a folder.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from pathlib import Path
from typing import NamedTuple

from fastattention import environment, files
from fastattention.errors import CompileError
from fastattention.gpu_runtime import compiler
from fastattention.gpu_runtime.variant import Variant

BUILT_AHEAD = Path(__file__).parent / "cubins"


class Origin(enum.Enum):
    """Where machine code was taken from."""

    PACKAGE = "package"
    CACHE = "cache"
    COMPILER = "compiler"


class Obtained(NamedTuple):
    """Machine code, ready to be loaded."""

    code: bytes
    origin: Origin


HEADERS = (".h", ".hpp", ".cuh")


def hash_sources(folders: tuple[Path, ...], suffixes: tuple[str, ...] = HEADERS) -> str:
    """Hash of every source in `folders` with its name below them: the same wherever the package is installed."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in suffixes):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


@functools.cache
def source_hash(folders: tuple[Path, ...]) -> str:
    """`hash_sources` of every file that kernels may include, computed once."""
    return hash_sources(folders)


def _file_name(kernel: Variant, target: int, *more: str) -> str:
    content = "\n".join(
        [source_hash(kernel.include_folders), compiler.source(kernel), *compiler.options(target), *more]
    )
    return f"{kernel.name}_on_sm{target}_{hashlib.sha256(content.encode()).hexdigest()[:24]}.cubin"


def built_ahead_path(kernel: Variant, target: int) -> Path:
    """Where the package keeps this cubin when it was built ahead, by any compiler."""
    return BUILT_AHEAD / _file_name(kernel, target)


def cached_path(kernel: Variant, target: int) -> Path:
    """Where this machine keeps this cubin as its compiler makes it."""
    numbers = ".".join(map(str, compiler.version()))
    return environment.kernel_cache() / _file_name(kernel, target, numbers)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file that others see complete or not at all. Raises CompileError where nothing can be written."""
    try:
        files.write_atomically(path, content)
    except OSError as error:
        raise _unusable("written", path, error) from error


def _read(path: Path) -> bytes | None:
    """The content of a file, or None where there is none. Raises CompileError where it cannot be read."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unusable("read", path, error) from error


def _unusable(done: str, path: Path, error: OSError) -> CompileError:
    return CompileError(
        f"a compiled kernel cannot be {done} in {path.parent}: {error.strerror or error}; "
        "set FASTATTENTION_CACHE to a folder that can be read and written"
    )


def generation(target: int) -> int:
    """The first compute capability of a GPU's generation, e.g. 80 for 86: its machine code runs on all of them."""
    return target // 10 * 10


def obtain(kernel: Variant, target: int) -> Obtained:
    """The machine code of a variant: built ahead, from the cache, or compiled now and cached. Raises CompileError."""
    for path in (built_ahead_path(kernel, target), built_ahead_path(kernel, generation(target))):
        if (code := _read(path)) is not None:
            return Obtained(code, Origin.PACKAGE)
    path = cached_path(kernel, target)
    if (code := _read(path)) is not None:
        return Obtained(code, Origin.CACHE)
    code = compiler.compile_kernel(kernel, target).code
    write_atomically(path, code)
    return Obtained(code, Origin.COMPILER)


def cubin(kernel: Variant, target: int) -> bytes:
    """The machine code of a variant, wherever it comes from. Raises CompileError."""
    return obtain(kernel, target).code
