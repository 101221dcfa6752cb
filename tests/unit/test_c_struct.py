"""Structures that Python reads from C headers lie as a C++ compiler lays them out, and are filled by name."""

from __future__ import annotations

import ctypes
import itertools
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

import fastattention
from fastattention.backends.common.c_struct import Params, constants_of, params_of

PACKAGE = Path(fastattention.__file__).parent
HEADERS = sorted(PACKAGE.rglob("*params.h"))
CASES = [
    pytest.param(header, name, id=name)
    for header in HEADERS
    for name in re.findall(r"struct (\w+) \{", header.read_text())
]
FLAT = [
    case
    for case in CASES
    if not any(hasattr(kind, "pointer_names") for _, kind, *_ in params_of(*case.values)._fields_)
]

SAMPLE = """
// A comment; with struct x {
#pragma once
namespace sample {
constexpr int kMost = 3;
enum { FIRST = 0, SECOND = 7 };
struct Inner {
    float* data;  // (n)
    int32_t count;
};
struct Outer {
    Inner inner;
    const void* in;
    void* parts[kMost];
    int32_t odd;
    int64_t sizes[2], total;  // the compiler leaves four bytes before these
    double scale;
    float last;
};
}  // namespace sample
"""


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    path = tmp_path / "sample.h"
    path.write_text(SAMPLE)
    return path


def layout(params: type[Params]) -> list[str]:
    places = [(name, getattr(params, name)) for name in (field[0] for field in params._fields_)]
    return [*(f"{name} {place.offset} {place.size}" for name, place in places), f"all 0 {ctypes.sizeof(params)}"]


def compiled_layout(header: Path, params: type[Params], folder: Path) -> list[str]:
    """The layout of the fields by a C++ compiler."""
    name = params.__name__
    fields = [field[0] for field in params._fields_]
    lines = [f'printf("{one} %zu %zu\\n", offsetof({name}, {one}), sizeof({name}::{one}));' for one in fields]
    namespaces = re.findall(r"namespace (\w+) \{", header.read_text())
    source, program = folder / "layout.cpp", folder / "layout"
    source.write_text(
        f'#include <cstddef>\n#include <cstdint>\n#include <cstdio>\n#include "{header}"\n'
        + "".join(f"using namespace {namespace};\n" for namespace in namespaces)
        + "\n".join(["int main() {", *lines, f'printf("all 0 %zu\\n", sizeof({name}));', "}\n"])
    )
    integers = next(PACKAGE.rglob("integers.h")).parent
    command = ["c++", "-std=c++17", "-Wall", "-Werror", f"-I{integers}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    return subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines()


needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")


@needs_compiler
@pytest.mark.parametrize(("header", "name"), CASES)
def test_fields_lie_where_the_compiler_puts_them(header: Path, name: str, tmp_path: Path) -> None:
    params = params_of(header, name)
    assert layout(params) == compiled_layout(header, params, tmp_path)


@needs_compiler
def test_arrays_structs_and_padding_lie_where_the_compiler_puts_them(sample: Path, tmp_path: Path) -> None:
    params = params_of(sample, "Outer")
    assert layout(params) == compiled_layout(sample, params, tmp_path)


def test_constants_are_those_of_constexpr_and_enums(sample: Path) -> None:
    assert constants_of(sample) == {"kMost": 3, "FIRST": 0, "SECOND": 7}


def filled(params: type[Params]) -> dict[str, float | tuple[float, ...]]:
    """A different value for every field of a structure without structs."""
    numbers = itertools.count(1)
    empty = params()
    lengths = {name: as_tuple(read(empty, name)) for name in params.value_names}
    values = {name: tuple(next(numbers) for _ in length) for name, length in lengths.items()}
    return {name: value if len(value) > 1 else value[0] for name, value in values.items()}


def read(params: Params, name: str) -> float | tuple[float, ...]:
    value = getattr(params, name)
    return tuple(value) if isinstance(value, ctypes.Array) else value


@pytest.mark.parametrize(("header", "name"), FLAT)
def test_a_template_and_pointers_fill_every_field(header: Path, name: str) -> None:
    params = params_of(header, name)
    values = filled(params)
    lengths = {name: getattr(params, name).size // 8 for name in params.pointer_names}
    addresses = list(range(1000, 1000 + sum(lengths.values())))
    make = params.maker(*params.pointer_names)
    made = make(params.template(**values), *addresses)
    assert {name: read(made, name) for name in values} == values
    found = [made_of for name in params.pointer_names for made_of in as_tuple(read(made, name))]
    assert found == addresses
    make(params.template(**values), *(0 for _ in addresses))  # another call does not change the first
    assert found == [made_of for name in params.pointer_names for made_of in as_tuple(read(made, name))]


def as_tuple(value: float | tuple[float, ...]) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)


def test_a_struct_within_another_is_filled_with_its_bytes(sample: Path) -> None:
    outer, inner = params_of(sample, "Outer"), params_of(sample, "Inner")
    call = bytes(inner.make(inner.template(count=5), data=64))
    template = outer.template(inner=call, odd=1, sizes=(2, 3), total=4, scale=0.5, last=1.5)
    made = outer.make(template, parts=(8, 16, 24))
    assert (made.inner.data, made.inner.count) == (64, 5)
    assert list(made.parts) == [8, 16, 24]
    assert getattr(made, "in") is None
    assert (made.odd, list(made.sizes), made.total, made.scale, made.last) == (1, [2, 3], 4, 0.5, 1.5)


def test_pointers_that_are_not_named_stay_null(sample: Path) -> None:
    outer = params_of(sample, "Outer")
    template = outer.template(inner=bytes(16), odd=1, sizes=(2, 3), total=4, scale=0.5, last=1.5)
    made = outer.maker("parts")(template, 8, 16, 24)
    assert (getattr(made, "in"), list(made.parts), made.odd) == (None, [8, 16, 24], 1)


@pytest.mark.parametrize(
    ("values", "named"),
    [({"count": 1, "counts": 2}, r"missing \[\], unknown \['counts'\]"), ({}, r"missing \['count'\], unknown \[\]")],
    ids=["unknown", "missing"],
)
def test_a_template_names_every_value_and_no_other(sample: Path, values: dict[str, int], named: str) -> None:
    with pytest.raises(TypeError, match=named):
        params_of(sample, "Inner").template(**values)


def test_a_value_that_does_not_fit_is_an_error(sample: Path) -> None:
    with pytest.raises(struct.error):
        params_of(sample, "Inner").template(count=1 << 31)


def test_unknown_pointers_and_another_order_are_errors(sample: Path) -> None:
    outer = params_of(sample, "Outer")
    with pytest.raises(TypeError, match="has no pointer count"):
        params_of(sample, "Inner").make(bytes(16), count=1)
    for names in (("parts", "in"), ("in", "odd"), ("missing",)):
        with pytest.raises(TypeError, match="not in the order"):
            outer.maker(*names)


@pytest.mark.parametrize(
    "text",
    [
        "struct A { int32_t x; void f(); };",
        "struct A { int32_t* x, y; };",
        "struct A { uint16_t x; };",
        "struct A { B x; };",
        "struct A { int32_t x : 3; };",
        "union A { int32_t x; };",
        "struct A { int32_t x",
        "constexpr int kMost = 2 * 4; struct A { int32_t x; };",
    ],
)
def test_what_the_parser_does_not_know_is_an_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.h"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"odd\.h: "):
        params_of(path, "A")


def test_values_between_pointers_are_not_written_with_them(tmp_path: Path) -> None:
    path = tmp_path / "mixed.h"
    path.write_text("struct Mixed { void* a; int64_t n; void* b; };")
    mixed = params_of(path, "Mixed")
    with pytest.raises(TypeError, match="between pointers"):
        mixed.maker("a", "b")
    made = mixed.make(mixed.template(n=5), a=8, b=16)
    assert (made.a, made.n, made.b) == (8, 5, 16)
