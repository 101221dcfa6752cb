"""Our kernels for 64-bit Arm, compiled as the build does, and the instructions of single calls under emulation."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness import run_tool

from fastattention.errors import CompileError

from .assembly import Instruction, disassemble, symbols
from .processors import PORTABLE

ROOT = Path(__file__).parents[2]
COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
_TABLE = "extern const Kernels kernels;"  # in kernels.cpp; it would compile everything
_EXECUTED = re.compile(r"^Trace \d+: \S+ \[\w+/(\w+)/", re.MULTILINE)
HEADDIM, KEYS, SCORES = 128, 32, 256  # of the calls in calls.hpp
_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class Call:
    """A function of calls.hpp."""

    kind: str  # product, softmax, score or accumulate
    dtype: str
    rows: int = 1  # query rows that share what a decode reads

    @property
    def name(self) -> str:
        """Its symbol."""
        return f"{self.kind}_{self.dtype}" + (f"_{self.rows}" if self.reads_cache else "")

    @property
    def reads_cache(self) -> bool:
        """Whether it is a part of a decode."""
        return self.kind in ("score", "accumulate")

    @property
    def work(self) -> int | None:
        """Bytes of the cache that a decode reads, or scores; None for a product, whose work are multiply-adds."""
        if self.reads_cache:
            return KEYS * HEADDIM * _ELEMENT_BYTES[self.dtype]
        return SCORES if self.kind == "softmax" else None


def all_calls() -> Iterator[Call]:
    """Every call that an instruction set may have."""
    yield from (Call("product", dtype) for dtype in ("float32", "bfloat16", "int8"))
    yield from (Call("softmax", dtype) for dtype in ("float32", "bfloat16"))
    for dtype in _ELEMENT_BYTES:
        for rows in (1, 4):
            yield from (Call(kind, dtype, rows) for kind in ("score", "accumulate"))


def compile_set(isa: str, folder: Path) -> Path:
    """A program that makes all calls by an instruction set, with the build's flags. Raises CompileError."""
    options = ("SYSTEM_NAME=Linux", "SYSTEM_PROCESSOR=aarch64", "EXPORT_COMPILE_COMMANDS=ON", "BUILD_TYPE=Release")
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), f"-DCMAKE_CXX_COMPILER={COMPILER}"]
    run_tool([*configure, *(f"-DCMAKE_{option}" for option in options)])
    built = json.loads((folder / "compile_commands.json").read_text())
    commands = [shlex.split(one["command"]) for one in built if one["file"].endswith("/kernels.cpp")]
    by_name = {_defined(command, "FA_NAMESPACE"): command for command in commands}
    by_name[PORTABLE] = [one.replace("neon", "generic") for one in by_name["neon"]]
    if isa not in by_name:
        raise CompileError(f"there is no instruction set {isa}; choose from {', '.join(by_name)}")
    return _compile(by_name[isa], folder / isa)


def _defined(command: list[str], name: str) -> str:
    return next(one.partition("=")[2] for one in command if one.startswith(f"-D{name}="))


def _compile(command: list[str], output: Path) -> Path:
    source = output.with_suffix(".cpp")
    kernels = (ROOT / "fastattention/backends/cpu/kernels/kernels.cpp").read_text()
    calls = Path(__file__).with_name("calls.hpp").read_text()
    source.write_text(kernels.partition(_TABLE)[0] + "}\n" + calls)
    run_tool([*command[: command.index("-o")], "-w", "-static", "-o", str(output), str(source)])
    return output


def trace(program: Path) -> dict[str, list[Instruction]]:
    """The instructions that each call of a program executes, by its name. Raises CompileError."""
    log = program.with_suffix(".log")
    emulate = [EMULATOR, "-cpu", "max", "-singlestep", "-d", "exec,nochain", "-D", str(log)]
    run_tool([*emulate, str(program)])
    executed = [int(address, 16) for address in _EXECUTED.findall(log.read_text())]
    known = symbols(program)
    first, end = min(executed), max(executed) + 4
    code = {one.address: one for one in disassemble(program, first, end)}
    entries = {known[call.name][0]: call.name for call in all_calls() if call.name in known}
    callers = {
        address
        for name, (begin, after) in known.items()
        if name == "main" or "call_" in name
        for address in range(begin, after, 4)
    }
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] | None = None
    for address in executed:
        if address in callers:
            current = None
        elif name := entries.get(address):
            current = found[name] = []
        if current is not None:
            current.append(code[address])
    return found
