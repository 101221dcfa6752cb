"""Lowers Triton kernels to the MLIR that Triton-Ascend hands to the vendor's compiler, without CANN or an NPU.

A launch decides what is compiled: the types of its arguments, which of them are absent, 1 or divisible by 16, its
constants and its options. All that is a Variant, as in Triton's own cache of compiled kernels.
"""

from __future__ import annotations

import functools
import hashlib
import re
import subprocess
import threading
from collections.abc import Hashable
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton._C.libtriton import ir
from triton.backends.ascend.compiler import AscendBackend, make_ttir, ttir_to_linalg
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from ascend.build_cache import cached_file
from fastattention.backends.ascend.call import Launch

TARGET = GPUTarget("npu", "Ascend910B3", 0)  # the IR is the same for every chip

_ONE_AT_A_TIME = threading.Lock()  # Triton's own part of lowering; Ascend's is a process


class LoweringError(Exception):
    """Triton-Ascend refuses a kernel."""


class Variant(NamedTuple):
    """A kernel and everything that it is compiled for."""

    kernel: JITFunction[Any]
    signature: tuple[tuple[str, str], ...]  # (argument, type as Triton writes it), absent ones included
    constants: tuple[tuple[str, Hashable], ...]  # constexprs, and arguments that are None or 1
    divisible: tuple[int, ...]  # indices of the arguments that are multiples of 16
    options: tuple[tuple[str, Hashable], ...]

    @property
    def run_time(self) -> list[str]:
        """The arguments that the compiled kernel takes, in order."""
        constants = dict(self.constants)
        return [name for name, _ in self.signature if name not in constants]

    def __str__(self) -> str:
        given = {**dict(self.constants), **dict(self.options)}
        types = ", ".join(f"{name}: {kind}" for name, kind in self.signature if name not in given)
        return f"{self.kernel.__name__}({types}; {', '.join(f'{name}={value}' for name, value in given.items())})"


class Lowered(NamedTuple):
    """A variant in MLIR."""

    text: str
    name: str  # name of its function
    mix_mode: str  # "mix": it needs Cube and Vector units; "aiv": Vector units alone
    types: tuple[str, ...]  # types of the parameters, as in "memref<?xf16>" and "i32"
    kinds: tuple[int | None, ...]  # access to each: 0 loaded, 1 stored, 2 both; None for parameters that are no memory


def variant_of(launch: Launch) -> Variant:
    """The variant that a launch needs, by the rules of JITFunction.run."""
    kernel = launch.kernel
    values = {**launch.arguments, **launch.constants}
    missing = [name for name in kernel.arg_names if name not in values]
    assert list(values) == kernel.arg_names, f"{kernel.__name__} wants its arguments in its own order, lacks {missing}"
    attributes = AscendBackend(TARGET).get_attrs_descriptor(kernel.params, tuple(values.values()))
    specialized = attributes.get_constants()
    constants = {
        parameter.name: value
        for parameter, value in zip(kernel.params, values.values(), strict=True)
        if parameter.is_constexpr or value is None or parameter.num in specialized
    }
    types = {p.name: mangle_type(values[p.name]) for p in kernel.params if not p.is_constexpr}
    signature = tuple((name, "*i8" if kind == "none" else kind) for name, kind in types.items())
    divisible = tuple(attributes.arg_properties["tt.divisibility"])
    return Variant(kernel, signature, tuple(constants.items()), divisible, tuple(launch.options.items()))


@functools.cache
def lower(variant: Variant) -> Lowered:
    """The MLIR of a variant. Raises LoweringError with what the compiler said."""
    content = f"{triton.__version__}\n{variant.kernel.cache_key}\n{variant}\n{variant.divisible}"
    key = hashlib.sha256(content.encode()).hexdigest()
    path = cached_file(f"{key[:24]}-{variant.kernel.__name__}.mlir", lambda path: _write(variant, path))
    return parse(path.read_text())


def parse(text: str) -> Lowered:
    """Reads the head of the only function in `text`."""
    head = re.search(r"func\.func @(\w+)\((.*?)\) attributes \{(.*)\} \{\n", text)
    mix_mode = re.search(r'mix_mode = "(\w+)"', head[3]) if head else None
    if head is None or mix_mode is None:
        raise LoweringError(f"this is not a kernel as Triton-Ascend writes it:\n{text[:1000]}")
    parameters = re.findall(r"%arg\d+: ([^ ,]+)(?: \{(.*?)\})?(?:, |$)", head[2])
    kinds = [re.search(r"tt\.tensor_kind = (\d)", attributes) for _, attributes in parameters]
    return Lowered(
        text, head[1], mix_mode[1], tuple(kind for kind, _ in parameters), tuple(k and int(k[1]) for k in kinds)
    )


def _write(variant: Variant, path: Path) -> None:
    backend = AscendBackend(TARGET)
    options = backend.parse_options(dict(variant.options))
    unknown = dict(variant.options).keys() - vars(options).keys()
    if unknown:
        raise LoweringError(f"Triton-Ascend has no options {sorted(unknown)}")
    attributes = backend.get_attrs_descriptor(None, None)
    attributes.arg_properties["tt.divisibility"] = list(variant.divisible)
    attributes.arg_properties["tt.equal_to"] = []
    source = ASTSource(variant.kernel, dict(variant.signature), dict(variant.constants), attributes)
    metadata = {"hash": "", "target": TARGET, **vars(options)}
    with _ONE_AT_A_TIME:
        context = ir.context()
        ir.load_dialects(context)
        module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
        module = make_ttir(module, metadata, options)
    try:
        text = ttir_to_linalg(module, metadata, options, named_ops=True)
    except subprocess.CalledProcessError as error:
        raise LoweringError(f"{variant}:\n{error.stderr.decode()[-3000:]}") from error
    path.write_text(text)
