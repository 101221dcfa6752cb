"""Exponentials and hyperbolic tangent of every instruction set keep the error bounds of docs/internals/numerics.md."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import fastattention
from fastattention.backends.cpu.library import load_library

HERE = Path(__file__).parent
KERNELS = Path(fastattention.__file__).parent / "backends" / "cpu" / "kernels"

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
# Instruction sets with bfloat16 units share the vectors of another.
SIMD_FLAGS = {"generic": [], "avx2": AVX2, "avx512": AVX512, "neon": []}

RELATIVE_BOUNDS = {"exp2": 2e-7, "exp2_short": 3e-6, "exp": 1e-7, "tanh": 3e-7}


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("simd", [isa for isa in load_library().isas if isa in SIMD_FLAGS])
def test_errors_are_within_their_bounds(simd: str, tmp_path: Path) -> None:
    program = tmp_path / "math_check"
    definitions = [f"-DFA_NAMESPACE={simd}", f'-DFA_SIMD_HEADER="simd/{simd}.hpp"']
    command = ["c++", "-std=c++17", "-O2", "-Wno-psabi", *SIMD_FLAGS[simd], *definitions, f"-I{KERNELS}"]
    subprocess.run([*command, str(HERE / "math_check.cpp"), "-o", str(program)], check=True)
    lines = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines()
    errors = {name: float(value) for name, value in (line.split() for line in lines[:5])}
    for name, bound in RELATIVE_BOUNDS.items():
        assert 0.0 < errors[name] < bound, errors
    assert errors["tanh_absolute"] < 2e-7, errors
    special = {"of_0": 1, "of_minus_200": 0, "of_minus_infinity": 0, "of_nan": 1}
    names = ("exp2", "exp2_short", "exp")
    assert lines[5:] == [f"{name}_{x} {value}" for name in names for x, value in special.items()]
