"""`fastattention export-kernel`: writes a folder from which Transformers loads fastattention as a hub kernel."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from fastattention.cli.console import OUTPUT
from fastattention.errors import ArgumentError
from fastattention.files import write_atomically
from fastattention.integrations import kernel_hub

# Transformers recognizes a kernel of flash-attn by "flash" in its name, and version 2 by the 2 that follows.
KERNEL = "fastattention/flash-attn2"
BACKENDS = ("cpu", "cuda")  # builds of torch; either also serves tensors on the CPU

_MODULE = f'''"""Attention functions of fastattention. Written by `fastattention export-kernel`."""

from {kernel_hub.__name__} import {", ".join(kernel_hub.__all__)}

__all__ = {json.dumps(kernel_hub.__all__)}
'''


def export_kernel(folder: Path) -> None:
    """Write the files of the kernel to `folder` and print how to use them.

    folder: a new one, made with its parents, or an empty one; an earlier export is overwritten.

    Raises ArgumentError for a folder with other files, which stays as it is, and for one that cannot be written to.
    """
    path, files = folder.absolute(), _files()
    if ":" in str(path):
        raise ArgumentError(f"folder={str(path)!r} must be without ':', which separates folders in LOCAL_KERNELS")
    try:
        other = _other_than(files, path)
        if other is not None:
            raise ArgumentError(
                f"folder={str(folder)!r} holds {str(other)!r}, which export-kernel did not write; "
                "name an empty or a new folder"
            )
        for name, text in files.items():
            write_atomically(path / name, text.encode())
    except OSError as error:
        raise ArgumentError(f"folder={str(folder)!r} is no folder to write to: {error.strerror}") from error
    usage = (
        f"written: {path}\n"
        f"in the shell: export LOCAL_KERNELS={shlex.quote(f'{KERNEL}={path}')}\n"
        f'in Python: from_pretrained(..., attn_implementation="{KERNEL}")'
    )
    OUTPUT.print(usage, markup=False, soft_wrap=True)


def _files() -> dict[str, str]:
    """Contents by name, relative to the folder: a package and its metadata for each backend."""
    files = {}
    for backend in BACKENDS:
        metadata = {
            "id": f"_fastattention_flash_attn2_{backend}",  # the name of the module
            "name": KERNEL.split("/")[1],
            "version": 1,  # the version that Transformers asks for if a name has none
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        files[f"build/torch-{backend}/__init__.py"] = _MODULE
        files[f"build/torch-{backend}/metadata.json"] = json.dumps(metadata, indent=2) + "\n"
    return files


def _other_than(files: dict[str, str], folder: Path) -> Path | None:
    """A path in `folder` that is not part of an earlier export of `files`, by any version, or its bytecode."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if "__pycache__" in name.parts or (path.is_dir() and not path.is_symlink()):
            continue
        if name.as_posix() not in files or b"fastattention" not in path.read_bytes():
            return name
    return None
