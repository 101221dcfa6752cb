"""The counting of cycles for 64-bit Arm: instructions, loops of a trace, and what the page calls a miss."""

from __future__ import annotations

from typing import Any

import pytest
from arm_cycles import loops, mca
from arm_cycles.assembly import Instruction
from pages import arm_cycles


def code(*lines: str, first: int = 0) -> list[Instruction]:
    """Instructions, one after the other in memory."""
    parts = (line.partition(" ") for line in lines)
    return [Instruction(first + 4 * index, name, operands) for index, (name, _, operands) in enumerate(parts)]


@pytest.mark.parametrize(
    ("line", "products"),
    [
        ("fmla v1.4s, v2.4s, v3.s[0]", 4),
        ("bfmmla v1.4s, v2.8h, v3.8h", 16),
        ("smmla v1.4s, v2.16b, v3.16b", 32),
        ("sdot v1.4s, v2.16b, v3.4b[1]", 16),
        ("bfdot v1.4s, v2.8h, v3.8h", 8),
        ("smlal2 v1.4s, v2.8h, v3.8h", 4),
        ("fmadd s0, s1, s2, s3", 1),
        ("fmul v1.4s, v2.4s, v3.4s", 0),
    ],
)
def test_multiply_adds_of_an_instruction(line: str, products: int) -> None:
    assert code(line)[0].products == products


def test_a_store_does_not_hold_up_its_address() -> None:
    (after, before, plain) = code("str q0, [x1], #16", "stp q0, q1, [x2, #32]!", "str q0, [x1, #16]")
    assert after.lines == ["str q0, [x1]", "add x1, x1, #16"]
    assert before.lines == ["add x2, x2, #32", "stp q0, q1, [x2]"]
    assert plain.lines == ["str q0, [x1, #16]"]


def test_accesses_of_the_stack_are_known() -> None:
    found = code("ldr q0, [sp, #16]", "stp q0, q1, [x29, #32]", "ldr q0, [x1]", "add sp, sp, #16")
    assert [one.uses_stack for one in found] == [True, True, False, False]


OUTER = code(
    "mov x0, #0", "ldr q0, [x1]", "fmla v1.4s, v0.4s, v2.4s", "b.ne 4 <f>", "fadd v1.4s, v1.4s, v3.4s", "b.ne 0 <f>"
)


def test_main_loop_is_the_innermost_with_most_arithmetic() -> None:
    inner = OUTER[1:4]
    trace = [*OUTER[:1], *inner * 5, *OUTER[4:]] * 3
    assert loops.main_loop(trace) == tuple(inner)


def test_loop_of_a_function_contains_no_other() -> None:
    assert loops.busiest_loop(OUTER) == tuple(OUTER[1:4])


def test_limit_is_named() -> None:
    units = {"V0": 4.0, "L": 1.0}
    assert mca.Counted(4.0, 2.0, units, 0.3).limit == "unit V0"
    assert mca.Counted(8.0, 8.0, units, 0.3).limit == "dispatch"
    assert mca.Counted(8.0, 2.0, units, 0.3).limit == "latency"


def record(kind: str, cycles: float, stack: int = 0) -> dict[str, Any]:
    loop = {"cycles": cycles, "multiply_cycles": 8.0, "stack_accesses": stack, "work": 64.0}
    call = {"work": 800, "cycles": 10 * cycles}
    return {"isa": "neon", "kind": kind, "dtype": "float32", "rows": 1, "processor": "p", "loop": loop, "call": call}


@pytest.mark.parametrize(
    ("kind", "cycles", "stack", "missed"),
    [
        ("product", 10.0, 0, False),  # 80% of the peak
        ("product", 10.1, 0, True),
        ("product", 8.0, 1, True),
        ("score", 8.0, 0, False),  # 10 bytes a cycle, at 2 GHz
        ("score", 8.1, 0, True),
        ("softmax", 100.0, 0, False),
    ],
)
def test_a_loop_misses_below_its_reach_or_with_accesses_of_the_stack(
    kind: str, cycles: float, stack: int, missed: bool
) -> None:
    processors = {"p": {"name": "p", "isa": "neon", "ghz": 2.0, "product_reach": 0.8}}
    assert arm_cycles.misses(record(kind, cycles, stack), processors) == missed
