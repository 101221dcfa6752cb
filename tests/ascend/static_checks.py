"""Checks that a run on a processor cannot make: the operations of a kernel, whether its loops run, its buffers.

Each check takes MLIR as Triton-Ascend writes it and returns its faults in words. Values in neighbouring regions may
have the same name: the last definition before a use counts.
"""

from __future__ import annotations

import re

from ascend.lowering import Lowered

# The operations of these kernels. Not among them on purpose: math.exp2, which the vendor's compiler is known to get
# wrong, and memref.store, with which single elements would be written one by one.
OPERATIONS = frozenset(
    "arith.addf arith.addi arith.andi arith.cmpf arith.cmpi arith.constant arith.divf arith.divsi arith.extf "
    "arith.extsi arith.index_cast arith.maxnumf arith.maxsi arith.minsi arith.mulf arith.muli arith.ori arith.remsi "
    "arith.select arith.sitofp arith.subf arith.subi arith.truncf bufferization.materialize_in_destination "
    "bufferization.to_tensor func.func linalg.broadcast linalg.fill linalg.generic linalg.index linalg.matmul "
    "linalg.reduce linalg.transpose linalg.yield math.absf math.exp math.log memref.alloc memref.cast memref.copy "
    "memref.load memref.reinterpret_cast memref.subview scf.for scf.if scf.yield tensor.empty tensor.extract "
    "tensor.extract_slice tensor.insert".split()
)

_OPERATION = re.compile(r"^ *(?:%\w+(?::\d+)? = )?([a-z]\w*\.\w+)\b", re.MULTILINE)
_LOOP = re.compile(r"scf\.for %\w+ = (%[\w-]+) to (%[\w-]+) step %[\w-]+ +iter_args\(.*?\) -> \((.*?)\)  :")


def foreign_operations(lowered: Lowered) -> list[str]:
    """Operations that are not known to be compiled well."""
    return sorted(set(_OPERATION.findall(lowered.text)) - OPERATIONS)


def loaded_and_stored(lowered: Lowered) -> list[str]:
    """Arguments that the kernel both reads and writes: a load may miss what another unit has stored."""
    return [f"argument {number} is loaded and stored" for number, kind in enumerate(lowered.kinds) if kind == 2]


def loops_that_may_not_run(lowered: Lowered) -> list[str]:
    """Loops that carry tiles without a bound that proves at least one iteration.

    Such a bound is `max(end, begin + 1)`, or two constants.
    """
    found = []
    for loop in _LOOP.finditer(lowered.text):
        begin, end, carried = loop.groups()
        if "tensor<" in carried and not _is_greater(lowered.text[: loop.start()], end, begin):
            found.append(f"the loop from {begin} to {end} may run zero times")
    return found


def _is_greater(text: str, value: str, than: str) -> bool:
    """Whether the definition of `value` says that it is greater than `than`."""
    constant, limit = _constant(text, value), _constant(text, than)
    if constant is not None and limit is not None:
        return constant > limit
    operation, operands = _definition(text, value)
    if operation == "arith.maxsi":
        return any(_is_greater(text, operand, than) for operand in operands)
    if operation == "arith.addi" and than in operands:
        added = [_constant(text, operand) for operand in operands if operand != than]
        return len(added) == 1 and added[0] is not None and added[0] > 0
    return False


def _definition(text: str, name: str) -> tuple[str, list[str]]:
    """The operation that made a value and its operands; an empty one for arguments."""
    found = re.findall(rf"^ *{re.escape(name)} = ([\w.]+) (.*?) :", text, re.MULTILINE)
    return (found[-1][0], found[-1][1].split(", ")) if found else ("", [])


def _constant(text: str, name: str) -> int | None:
    operation, operands = _definition(text, name)
    return int(operands[0]) if operation == "arith.constant" and re.fullmatch(r"-?\d+", operands[0]) else None
