"""Libraries in the place of CANN's, so that torch_npu can be imported where there is no CANN.

acl_stub.c gives them one NPU whose memory is the host's. The other symbols are read from torch_npu's own libraries:
every symbol with a prefix of CANN's that they do not define themselves. Loaded into the process, they are found by name
when torch_npu asks for them.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
from pathlib import Path

from ascend.build_cache import cached_file

# The names under which torch_npu asks for them. Some functions are looked up in only one of them, so each has all.
LIBRARIES = ("ascendcl", "hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
PREFIXES = re.compile(r"acl|Msprof|Hccl|rt[A-Z]")
WRITTEN = Path(__file__).with_name("acl_stub.c")


def missing_symbols(torch_npu: Path) -> list[str]:
    """Names that the libraries of the package in folder `torch_npu` want from CANN."""
    libraries = [*torch_npu.glob("lib/*.so"), *torch_npu.glob("_C*.so")]
    assert libraries, f"{torch_npu} holds no libraries"
    return sorted(name for name in _symbols(libraries, "--undefined-only") if PREFIXES.match(name))


def _symbols(libraries: list[Path], which: str) -> set[str]:
    command = ["nm", "--dynamic", "--format=posix", which, *map(str, libraries)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[0].split("@")[0] for line in lines if line and not line.endswith(":")}


def source(symbols: list[str]) -> str:
    """C: acl_stub.c, and a function that returns 0 for every other symbol."""
    written = WRITTEN.read_text()
    made = [f"long {name}(void) {{ return 0; }}" for name in symbols if not re.search(rf"\b{name}\(", written)]
    return "\n".join([written, *made, ""])


def load(torch_npu: Path) -> None:
    """Compiles the libraries once, and loads them for all that is loaded later in this process."""
    code = source(missing_symbols(torch_npu))
    for library in LIBRARIES:
        ctypes.CDLL(str(_compiled(library, code)), mode=ctypes.RTLD_GLOBAL)


def _compiled(library: str, code: str) -> Path:
    def compile_to(path: Path) -> None:
        options = ["-shared", "-fPIC", f"-Wl,-soname,lib{library}.so", "-x", "c", "-", "-o", str(path)]
        subprocess.run(["cc", *options], input=code, text=True, check=True)

    return cached_file(f"{hashlib.sha256(code.encode()).hexdigest()[:24]}-lib{library}.so", compile_to)
