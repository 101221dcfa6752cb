"""Structures say what the headers of kernels say: names, order, places and sizes; and how kernels divide."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import fastattention
from fastattention.backends.common.params import Params
from fastattention.backends.cuda.kernel_config import KERNEL_FOLDERS
from fastattention.backends.cuda.linear.params import StepParams
from fastattention.backends.cuda.params import (
    AppendParams,
    AttentionParams,
    BackwardParams,
    MergeParams,
    QuantizeParams,
)
from fastattention.backends.cuda.plan import divisor
from fastattention.distributed.transports.all_reduce import AllReduceParams

PACKAGE = Path(fastattention.__file__).parent
PARAMS = PACKAGE / "backends" / "cuda" / "kernels" / "params.h"
ALL_REDUCE = PACKAGE / "distributed" / "kernels" / "all_reduce_params.h"
LINEAR_STEP = PACKAGE / "linear" / "backends" / "cuda" / "kernels" / "step_params.h"
# BackwardParams holds another struct, and is filled field by field.
TEMPLATES: dict[type[Params], Path] = {
    AttentionParams: PARAMS,
    QuantizeParams: PARAMS,
    AppendParams: PARAMS,
    MergeParams: PARAMS,
    AllReduceParams: ALL_REDUCE,
    StepParams: LINEAR_STEP,
}
HEADERS: dict[type[Params], Path] = {AttentionParams: PARAMS, BackwardParams: PARAMS, **TEMPLATES}

every_struct = pytest.mark.parametrize("struct", HEADERS, ids=lambda struct: struct.__name__)
every_template = pytest.mark.parametrize("struct", TEMPLATES, ids=lambda struct: struct.__name__)


def names_in_header(struct: type[Params]) -> list[str]:
    """The fields of a struct, in their order."""
    text = re.sub(r"//[^\n]*", "", HEADERS[struct].read_text())
    found = re.search(rf"struct {struct.__name__} \{{(.*?)\}};", text, re.DOTALL)
    assert found is not None
    statements = (statement for statement in found[1].split(";") if statement.strip())
    return [re.findall(r"\w+(?!\w*\])", declared)[-1] for statement in statements for declared in statement.split(",")]


def names(struct: type[Params]) -> list[str]:
    return [field[0] for field in struct._fields_]


def test_the_headers_have_no_other_struct() -> None:
    headers = dict.fromkeys(HEADERS.values())
    found = [name for header in headers for name in re.findall(r"struct (\w+) \{", header.read_text())]
    assert found == [struct.__name__ for struct in HEADERS]


@every_struct
def test_fields_have_the_same_names_in_the_same_order(struct: type[Params]) -> None:
    assert names(struct) == names_in_header(struct)


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@every_struct
def test_fields_lie_where_the_compiler_puts_them(struct: type[Params], tmp_path: Path) -> None:
    lines = [
        f'printf("{name} %zu %zu\\n", offsetof({struct.__name__}, {name}), sizeof({struct.__name__}::{name}));'
        for name in names_in_header(struct)
    ]
    headers = "".join(f"#include {header}\n" for header in (f'"{HEADERS[struct]}"', "<cstddef>", "<cstdio>"))
    includes = f"{headers}using fastattention::{struct.__name__};\n"
    size = f'printf("all 0 %zu\\n", sizeof({struct.__name__}));'
    source, program = tmp_path / "layout.cpp", tmp_path / "layout"
    source.write_text(includes + "int main() {\n" + "\n".join([*lines, size]) + "\n}\n")
    folders = [f"-I{folder}" for folder in KERNEL_FOLDERS]
    command = ["c++", "-std=c++17", "-Wall", "-Werror", *folders, str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines()

    fields = [(name, getattr(struct, name)) for name in names(struct)]
    expected = [f"{name} {field.offset} {field.size}" for name, field in fields]
    assert printed == [*expected, f"all 0 {ctypes.sizeof(struct)}"]


@every_template
def test_a_template_holds_all_but_the_pointers(struct: type[Params]) -> None:
    pointers = [name for name in names(struct) if is_pointer(struct, name)]
    others = [name for name in names(struct) if name not in pointers]
    empty = struct()
    num_pointers, num_others = (len(values(empty, listed)) for listed in (pointers, others))
    template = struct.template(*range(1, num_others + 1))
    params = struct.make(template, *range(1000, 1000 + num_pointers))
    assert values(params, pointers) == list(range(1000, 1000 + num_pointers))
    assert values(params, others) == list(range(1, num_others + 1))
    # Of its own: another call with the same template changes nothing.
    struct.make(template, *(0 for _ in range(num_pointers)))
    assert values(params, pointers)[0] == 1000


def is_pointer(struct: type[Params], name: str) -> bool:
    kind = dict(field[:2] for field in struct._fields_)[name]
    return getattr(kind, "_type_", None) is ctypes.c_void_p or kind is ctypes.c_void_p


def values(params: Params, listed: list[str]) -> list[float]:
    """Of fields, arrays included, one after the other."""
    found = (getattr(params, name) for name in listed)
    return [value for field in found for value in (field if isinstance(field, ctypes.Array) else [field])]


@pytest.mark.parametrize("size", [2, 3, 5, 7, 8, 12, 33, 64, 132, 1000, 65_535, 65_536, 2**30 + 1, 2**31 - 1])
def test_kernels_divide_by_multiplication(size: int) -> None:
    """As numbers.cuh does, on 32 bits without a sign."""
    multiplier, shift = divisor(size)
    assert -(2**31) <= multiplier < 2**31
    assert 0 <= shift < 32
    near = (number + step for number in (0, size, 2 * size, 2**31 // size * size, 2**31) for step in (-1, 0, 1))
    for number in (*near, *(2**31 * part // 97 for part in range(97))):
        if 0 <= number < 2**31:
            assert (number * (multiplier % 2**32) >> 32) >> shift == number // size


@pytest.mark.parametrize("size", [0, 1])
def test_nothing_is_divided_by_one(size: int) -> None:
    assert divisor(size) == (0, 0)
