"""params.py says what kernels/params.h says: names, order, places and sizes."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import fastattention
from fastattention.backends.cuda.params import ForwardParams

HEADER = Path(fastattention.__file__).parent / "backends" / "cuda" / "kernels" / "params.h"


def names_in_header() -> list[str]:
    """The fields of the struct, in their order."""
    text = re.sub(r"//[^\n]*", "", HEADER.read_text())
    found = re.search(r"struct ForwardParams \{(.*?)\};", text, re.DOTALL)
    assert found is not None
    statements = (statement for statement in found[1].split(";") if statement.strip())
    return [re.findall(r"\w+", declared)[-1] for statement in statements for declared in statement.split(",")]


def test_fields_have_the_same_names_in_the_same_order() -> None:
    assert [field[0] for field in ForwardParams._fields_] == names_in_header()


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_fields_lie_where_the_compiler_puts_them(tmp_path: Path) -> None:
    lines = [
        f'printf("{name} %zu %zu\\n", offsetof(ForwardParams, {name}), sizeof(ForwardParams::{name}));'
        for name in names_in_header()
    ]
    includes = f'#include "{HEADER}"\n#include <cstddef>\n#include <cstdio>\nusing fastattention::ForwardParams;\n'
    size = 'printf("all 0 %zu\\n", sizeof(ForwardParams));'
    source, program = tmp_path / "layout.cpp", tmp_path / "layout"
    source.write_text(includes + "int main() {\n" + "\n".join([*lines, size]) + "\n}\n")
    subprocess.run(["c++", "-std=c++17", "-Wall", "-Werror", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines()

    fields = [(name, getattr(ForwardParams, name)) for name, *_ in ForwardParams._fields_]
    expected = [f"{name} {field.offset} {field.size}" for name, field in fields]
    assert printed == [*expected, f"all 0 {ctypes.sizeof(ForwardParams)}"]
