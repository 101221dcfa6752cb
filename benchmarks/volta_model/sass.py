"""Volta's machine code as `cuobjdump -sass` prints it: instructions, with the control codes that time them.

An instruction has 128 bits. The uppermost tell the scheduler what it may do, on Volta and Turing alike:

    bits 105..108  stall          cycles until the warp may issue its next instruction
    bit  109       yield          0: another warp is preferred next; 1: this one goes on
    bits 110..112  write barrier  scoreboard (0 to 5) that is busy until the result is there; 7: none
    bits 113..115  read barrier   scoreboard that is busy until the operands have been read; 7: none
    bits 116..121  wait mask      scoreboards that must be free before the instruction issues
    bits 122..125  reuse          operands that stay in the register cache for the next instruction

Some descriptions have the yield bit the other way round. Every kernel shows that 0 yields. Operands in the register
cache are lost when another warp issues in between, and no instruction that keeps operands has 0 there.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass

INSTRUCTION_BYTES = 16
KNOWN_TARGETS = (70, 72, 75)  # they share the encoding of control codes
_NO_BARRIER = 7
_BRANCHES = {"BRA", "BSSY", "CALL", "JMP"}
_NEVER = "!PT"

_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_TARGET = re.compile(r"^\s*code for sm_(\d+)")
_FIRST_WORD = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* 0x([0-9a-f]{16}) \*/")
_SECOND_WORD = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")
_PREDICATED = re.compile(r"^@(!?U?P(?:\d|T))\s+(.*)$")
_RESOURCES = re.compile(r"^ Function (\S+):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a warp and the control code it carries."""

    address: int  # bytes from the function's start
    text: str  # without predicate and semicolon: "LDS.U.128 R4, [R2+0x10]"
    predicate: str | None  # "P0", "!P3"
    opcode: str  # "LDS.U.128"
    stall: int  # cycles
    yields: bool
    write_barrier: int | None
    read_barrier: int | None
    wait_mask: int
    reuse: int

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.split(".")[0]

    @property
    def target(self) -> int | None:
        """The address that a branch, a call or a BSSY names."""
        found = re.search(r"\b0x([0-9a-f]+)$", self.text) if self.name in _BRANCHES else None
        return int(found[1], 16) if found else None

    @property
    def width(self) -> int:
        """Bytes that a thread loads or stores; 4 for instructions that do not access memory."""
        return next((int(size) // 8 for size in re.findall(r"\.[US]?(8|16|64|128)\b", self.opcode)), 4)

    @property
    def is_off(self) -> bool:
        """Whether no thread ever executes it: it only takes an issue slot."""
        return self.predicate == _NEVER

    def switched_off(self) -> Instruction:
        """This instruction, marked as executed by no thread, which its predicate does not show."""
        return dataclasses.replace(self, predicate=_NEVER)


@dataclass(frozen=True)
class Function:
    """One kernel, or a function that kernels call. The last three fields are None without resource usage."""

    name: str
    instructions: tuple[Instruction, ...]
    registers: int | None = None  # per thread
    shared_bytes: int | None = None  # per CTA, without dynamic shared memory
    stack_bytes: int | None = None  # per thread


def parse(text: str) -> list[Function]:
    """The functions in the output of `cuobjdump -sass`, with --dump-resource-usage or without.

    Raises ValueError for machine code of another GPU, and for a listing without control codes.
    """
    resources = {name: tuple(map(int, numbers)) for name, *numbers in _RESOURCES.findall(text)}
    functions = []
    for name, lines in _sections(text):
        registers, stack, shared = resources.get(name, (None, None, None))
        functions.append(Function(name, tuple(_instructions(lines)), registers, shared, stack))
    return functions


def _sections(text: str) -> Iterator[tuple[str, list[str]]]:
    """(name of a function, its lines)."""
    name: str | None = None
    lines: list[str] = []
    for line in text.splitlines():
        if (target := _TARGET.match(line)) and int(target[1]) not in KNOWN_TARGETS:
            raise ValueError(f"machine code for sm_{target[1]}; control codes are read of {KNOWN_TARGETS}")
        if found := _FUNCTION.match(line):
            if name is not None:
                yield name, lines
            name, lines = found[1], []
        lines.append(line)
    if name is not None:
        yield name, lines


def _instructions(lines: list[str]) -> Iterator[Instruction]:
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        first = _FIRST_WORD.match(line)
        if first is None:
            continue
        second = _SECOND_WORD.match(after)
        if second is None:
            raise ValueError(f"no second word after {line.strip()!r}: each instruction of sm_70 has two")
        yield _instruction(int(first[1], 16), first[2], int(second[1], 16))


def _instruction(address: int, text: str, second_word: int) -> Instruction:
    control = second_word >> 41
    predicated = _PREDICATED.match(text)
    predicate, text = (predicated[1], predicated[2]) if predicated else (None, text)
    return Instruction(
        address=address,
        text=text,
        predicate=predicate,
        opcode=text.split()[0],
        stall=control & 15,
        yields=not control >> 4 & 1,
        write_barrier=_barrier(control >> 5 & 7),
        read_barrier=_barrier(control >> 8 & 7),
        wait_mask=control >> 11 & 63,
        reuse=control >> 17 & 15,
    )


def _barrier(number: int) -> int | None:
    return None if number == _NO_BARRIER else number
