"""Properties of an instruction for the simulation: its unit, how long it keeps the unit busy, when it is done."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from .chip import Chip
from .sass import INSTRUCTION_BYTES, Instruction


class Unit(enum.IntEnum):
    """The unit of an instruction. From SPECIAL on, instructions wait in the queue of their scheduler."""

    NONE = 0  # branches, barriers and the like: they take only an issue slot
    FMA = 1
    ALU = 2
    HALF = 3
    DOUBLE = 4
    TENSOR = 5
    SPECIAL = 6
    SHARED = 7  # shared memory and shuffles
    GLOBAL = 8
    LOCAL = 9  # the stack: small enough to stay in the L1 cache
    CONSTANT = 10


_UNITS: dict[Unit, str] = {
    Unit.NONE: "NOP BRA BRX JMP EXIT RET CALL BSSY BSYNC BREAK WARPSYNC YIELD DEPBAR BAR KILL MEMBAR ERRBAR BPT "
    "CCTL NANOSLEEP BMOV RPCMOV S2R B2R",
    Unit.FMA: "FADD FADD32I FMUL FMUL32I FFMA FFMA32I FSWZADD IMAD IMAD32I IMUL IDP",
    Unit.ALU: "IADD3 IADD32I LOP3 LOP32I SHF SHL SHR LEA ISETP FSETP FSET FMNMX IMNMX SEL FSEL PRMT MOV MOV32I FCHK "
    "PSETP PLOP3 P2R R2P CS2R VOTE IABS BMSK SGXT VABSDIFF XMAD",
    Unit.HALF: "HADD2 HMUL2 HFMA2 HSETP2 HSET2 HADD2_32I HMUL2_32I HFMA2_32I",
    Unit.DOUBLE: "DADD DMUL DFMA DSETP DMNMX",
    Unit.TENSOR: "HMMA",
    Unit.SPECIAL: "MUFU F2F F2I I2F FRND POPC FLO BREV",
    Unit.SHARED: "LDS STS SHFL ATOMS",
    Unit.GLOBAL: "LDG STG LD ST RED ATOM ATOMG MATCH",
    Unit.LOCAL: "LDL STL",
    Unit.CONSTANT: "LDC",
}
UNIT_OF = {name: unit for unit, names in _UNITS.items() for name in names.split()}
_LOADS = {"LDG", "LD"}
_STORES = {"STS", "STG", "ST", "STL", "RED"}
_MEMORY = {Unit.SHARED, Unit.GLOBAL, Unit.LOCAL, Unit.CONSTANT}


@dataclass(frozen=True, slots=True)
class Operation:
    """An instruction on its way through a warp. Times are in cycles."""

    unit: Unit
    interval: float  # while the unit, or the path to the shared ones, is busy
    latency: int  # from the unit to the release of the write barrier
    read_latency: int  # from the unit to the release of the read barrier
    wavefronts: int  # wavefronts of shared memory
    global_bytes: int  # bytes of a warp to or from the L2 cache
    stall: int
    yields: bool
    waits: tuple[int, ...]
    write_barrier: int | None
    read_barrier: int | None
    line: int  # line of the instruction caches
    jumps: bool  # the next operation is not the next instruction in memory
    is_barrier: bool


def operations(path: Iterable[Instruction], chip: Chip) -> list[Operation]:
    """The operations of a warp, in order. Raises ValueError for an instruction that the model does not know.

    Accesses to shared memory have no bank conflicts.
    """
    path = list(path)
    following = [*(instruction.address for instruction in path[1:]), None]
    return [_operation(each, after, chip) for each, after in zip(path, following, strict=True)]


def _operation(instruction: Instruction, after: int | None, chip: Chip) -> Operation:
    unit = UNIT_OF.get(instruction.name)
    if unit is None:
        raise ValueError(f"the model does not know {instruction.opcode} at {instruction.address:#x}; see operation.py")
    if instruction.is_off:
        unit = Unit.NONE
    size = instruction.width * chip.warp_threads if unit in (Unit.SHARED, Unit.GLOBAL, Unit.LOCAL) else 0
    global_bytes = _global_bytes(instruction, size, chip) if unit is Unit.GLOBAL else 0
    return Operation(
        unit=unit,
        interval=_interval(instruction, unit, size, chip),
        latency=_latency(instruction, unit, global_bytes, chip),
        read_latency=_read_latency(instruction, size, chip),
        wavefronts=_wavefronts(size, chip),
        global_bytes=global_bytes,
        stall=max(1, instruction.stall),
        yields=instruction.yields,
        waits=tuple(bit for bit in range(6) if instruction.wait_mask >> bit & 1),
        write_barrier=instruction.write_barrier,
        read_barrier=instruction.read_barrier,
        line=instruction.address // chip.line_bytes,
        jumps=after is not None and after != instruction.address + INSTRUCTION_BYTES,
        is_barrier=instruction.name == "BAR",
    )


def _interval(instruction: Instruction, unit: Unit, size: int, chip: Chip) -> float:
    if unit in _MEMORY:
        return max(chip.access_interval, size / chip.transfer_width)
    intervals = {
        Unit.NONE: 1.0,
        Unit.FMA: chip.fma_interval,
        Unit.ALU: chip.alu_interval,
        Unit.HALF: chip.half_interval,
        Unit.DOUBLE: chip.double_interval,
        Unit.TENSOR: chip.tensor_interval,
        Unit.SPECIAL: chip.special_interval,
    }
    return intervals[unit]


def _global_bytes(instruction: Instruction, size: int, chip: Chip) -> int:
    """Bytes that an access needs from the L2 cache."""
    return round(size * (1.0 - chip.l1_share)) if instruction.name in _LOADS else size


def _latency(instruction: Instruction, unit: Unit, global_bytes: int, chip: Chip) -> int:
    if instruction.name == "SHFL":
        return chip.shuffle_latency
    if instruction.name in ("S2R", "B2R"):
        return chip.special_register_latency
    latencies = {
        Unit.SPECIAL: chip.special_latency,
        Unit.SHARED: chip.shared_latency,
        Unit.GLOBAL: chip.l2_latency if global_bytes else chip.l1_latency,
        Unit.LOCAL: chip.l1_latency,
        Unit.CONSTANT: chip.constant_latency,
    }
    return latencies.get(unit, 0)


def _read_latency(instruction: Instruction, size: int, chip: Chip) -> int:
    """Cycles until operands have been read; stores also read their data from registers."""
    return chip.read_latency + (size // chip.transfer_width if instruction.name in _STORES else 0)


def _wavefronts(size: int, chip: Chip) -> int:
    """Wavefronts of an access. Shared, local and global memory share one path to an SM's registers."""
    return -(-size // chip.shared_width)
