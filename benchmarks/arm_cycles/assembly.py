"""Instructions of 64-bit Arm as objdump prints them, and the arithmetic in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from harness import run_tool

OBJDUMP = "aarch64-linux-gnu-objdump"
NM = "aarch64-linux-gnu-nm"
_LINE = re.compile(r"^\s*([0-9a-f]+):\t(\S+)\s*(.*)$")
_LANES = re.compile(r"v\d+\.(\d+)[bhsd]\b|z\d+\.s\b")
_AFTER = re.compile(r"(.*), \[(\w+)\], (#-?\w+)")
_BEFORE = re.compile(r"(.*), \[(\w+), (#-?\w+)\]!")
# Products that each lane of a result adds up.
_PRODUCTS_OF_LANE = {
    "fmla": 1, "fmlal": 1, "fmlal2": 1, "smlal": 1, "smlal2": 1, "mla": 1,
    "bfdot": 2, "sdot": 4, "bfmmla": 4, "smmla": 8,
}  # fmt: skip
_SCALAR_PRODUCTS = ("fmadd", "fmsub", "fnmadd", "fnmsub")
_CALLS = ("bl", "blr", "ret")


@dataclass(frozen=True)
class Instruction:
    """One instruction."""

    address: int
    mnemonic: str
    operands: str

    @cached_property
    def products(self) -> int:
        """Multiply-adds, of vectors of 128 bits where the processor chooses their size."""
        if self.mnemonic in _SCALAR_PRODUCTS:
            return 1
        each, lanes = _PRODUCTS_OF_LANE.get(self.mnemonic, 0), _LANES.match(self.operands)
        return each * int(lanes[1] or 4) if each and lanes else 0

    @cached_property
    def is_arithmetic(self) -> bool:
        """Whether it computes in vector registers."""
        of_vectors = re.match(r"[vqsdh]\d", self.operands)
        return bool(of_vectors) and not self.mnemonic.startswith(("ld", "st", "mov", "dup"))

    @cached_property
    def uses_stack(self) -> bool:
        """Whether it loads from or stores to the stack."""
        return self.mnemonic.startswith(("ld", "st")) and any(base in self.operands for base in ("[sp", "[x29"))

    @cached_property
    def lines(self) -> list[str]:
        """The instruction for llvm-mca. Branches go to a label of no meaning, and calls are left out.

        A store that also advances its address becomes two instructions: the address does not wait for the data, but
        would in llvm-mca.
        """
        if self.mnemonic in _CALLS:
            return []
        operands = re.sub(r"\b[0-9a-f]+ <.*>$", ".Lsomewhere", self.operands)
        if self.mnemonic in ("str", "stp"):
            if after := _AFTER.fullmatch(operands):
                return [f"{self.mnemonic} {after[1]}, [{after[2]}]", f"add {after[2]}, {after[2]}, {after[3]}"]
            if before := _BEFORE.fullmatch(operands):
                return [f"add {before[2]}, {before[2]}, {before[3]}", f"{self.mnemonic} {before[1]}, [{before[2]}]"]
        return [f"{self.mnemonic} {operands}"]


def symbols(path: Path) -> dict[str, tuple[int, int]]:
    """Names of functions, demangled and without arguments, with their first address and that of the next function."""
    lines = [line.split(" ", 2) for line in run_tool([NM, "--demangle", str(path)]).splitlines()]
    found = sorted((int(line[0], 16), line[2]) for line in lines if line[0] and line[1] in "tTwW")
    starts = sorted({address for address, _ in found})
    ends = dict(zip(starts, [*starts[1:], starts[-1] + (1 << 16)], strict=True))
    return {name.split("(")[0]: (address, ends[address]) for address, name in found}


def disassemble(path: Path, first: int, end: int) -> list[Instruction]:
    """The instructions from address `first` to `end`."""
    limits = [f"--start-address={first}", f"--stop-address={end}"]
    found = []
    for line in run_tool([OBJDUMP, "--disassemble", "--no-show-raw-insn", *limits, str(path)]).splitlines():
        if match := _LINE.match(line):
            found.append(Instruction(int(match[1], 16), match[2], match[3].partition("//")[0].strip()))
    return found
