"""MLIR to machine code of this processor, by the tools of LLVM 19."""

from __future__ import annotations

import functools
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

from ascend.build_cache import cached_file

TOOLS = ("mlir-opt", "mlir-translate", "opt", "llc", "llvm-config", "cc")
LLVM = Path("/usr/lib/llvm-19/bin")
RUNTIME = Path(__file__).parent / "runtime.c"

# Products with the loop over columns innermost, in which LLVM vectorizes them as they are: a sum over the innermost
# loop, it may not reorder.
SCHEDULE = """
module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(%module: !transform.any_op {transform.readonly}) {
    %products = transform.structured.match ops{["linalg.matmul"]} in %module : (!transform.any_op) -> !transform.any_op
    transform.foreach %products : !transform.any_op {
    ^bb0(%product: !transform.any_op):
      %loops = transform.structured.generalize %product : (!transform.any_op) -> !transform.any_op
      transform.structured.interchange %loops iterator_interchange = [0, 2, 1]
        : (!transform.any_op) -> !transform.any_op
    }
    transform.yield
  }
}
"""

PASSES = (
    "--transform-interpreter",
    "--convert-elementwise-to-linalg",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=bufferize-function-boundaries=1 allow-return-allocs-from-loops=1",
    "--buffer-deallocation-pipeline",
    "--convert-linalg-to-affine-loops",
    "--affine-loop-invariant-code-motion",
    "--lower-affine",
    "--memref-expand",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--arith-expand=include-bf16=1",  # LLVM would call libgcc to round to bfloat16, or not, as the processor has it
    "--convert-arith-to-llvm",
    "--convert-index-to-llvm",
    "--convert-cf-to-llvm",
    "--finalize-memref-to-llvm=use-generic-functions=1",
    "--convert-func-to-llvm",
    "--convert-arith-to-llvm",
    "--reconcile-unrealized-casts",
)

# Loads of single elements, for which the machine code calls no function that could check them.
_LOAD = re.compile(r"^( *)%\w+ = memref\.load (%\w+)\[", re.M)
_ELEMENT = r"{} = memref\.reinterpret_cast (%arg\d+) to offset: \[(\S+)\], sizes: \[1\], .*? : (memref<\?x\w+>) to"
_CHECK = "fastattention_check_load"

# Attributes by which Triton describes arguments. They are removed, so that kernels that differ only in them are
# compiled once.
_HINTS = re.compile(r"tt\.divisibility = \d+ : i32(?:, )?")


class LlvmError(Exception):
    """A tool is not installed, or does not take a kernel."""


def find_tool(name: str) -> str | None:
    """The tool called `name`, or None. Debian's packages add the version to names, or put tools in a folder."""
    return shutil.which(name) if name == "cc" else shutil.which(f"{name}-19") or shutil.which(str(LLVM / name))


def build(name: str, mlir: str) -> Path:
    """The shared library of the function `name`. Raises LlvmError with the tool, and the pass if known."""
    code = _with_checked_loads(_HINTS.sub("", mlir))
    key = _hash(code, RUNTIME.read_text(), SCHEDULE, *PASSES, _toolchain())
    return cached_file(f"{key}-{name}.so", lambda path: _compile(name, code, path))


def _with_checked_loads(mlir: str) -> str:
    """The same with a call before each load of a single element: its index, and the elements of its argument."""
    pieces, end, declaration = [], 0, f"func.func private @{_CHECK}(index, index)\n"
    for load in _LOAD.finditer(mlir):
        indent, element = load.groups()
        pieces.append(mlir[end : load.start()])
        end = load.start()
        # Neighbouring regions reuse names, so the last definition counts.
        *_, (argument, index, kind) = re.findall(_ELEMENT.format(re.escape(element)), mlir[: load.start()])
        name = f"%checked_{len(pieces)}"
        lines = [f"{name}_axis = arith.constant 0 : index"]
        if index.isdecimal():
            lines.append(f"{name}_index = arith.constant {index} : index")
            index = f"{name}_index"
        lines.append(f"{name}_size = memref.dim {argument}, {name}_axis : {kind}")
        lines.append(f"func.call @{_CHECK}({index}, {name}_size) : (index, index) -> ()")
        pieces += [f"{indent}{line}\n" for line in lines]
    pieces.append(mlir[end:])
    return "".join(pieces).replace("  func.func @", f"  {declaration}  func.func @", 1)


def _hash(*content: str) -> str:
    return hashlib.sha256("\n".join(content).encode()).hexdigest()[:24]


def _compile(name: str, code: str, path: Path) -> None:
    folder = path.parent
    source, schedule, llvm_mlir, llvm_ir, bitcode, machine_code = (
        str(folder / name) for name in ("kernel.mlir", "schedule.mlir", "llvm.mlir", "llvm.ll", "llvm.bc", "kernel.o")
    )
    Path(source).write_text(code)
    Path(schedule).write_text(SCHEDULE)
    preload = f"--transform-preload-library=transform-library-paths={schedule}"
    # Without a triple, opt does not know how wide vectors are. Unrolled, loops take longer to compile than to run.
    target = ("-mcpu=native", f"-mtriple={_triple()}")
    _run(name, "mlir-opt", "--mlir-print-ir-after-failure", preload, *PASSES, source, "-o", llvm_mlir)
    _run(name, "mlir-translate", "--mlir-to-llvmir", llvm_mlir, "-o", llvm_ir)
    _run(name, "opt", "-O2", "--disable-loop-unrolling", *target, llvm_ir, "-o", bitcode)
    _run(name, "llc", "-O1", *target, "-filetype=obj", "-relocation-model=pic", bitcode, "-o", machine_code)
    _run(name, "cc", "-shared", machine_code, str(_runtime()), "-o", str(path), "-lm")


def _runtime() -> Path:
    def compile_to(path: Path) -> None:
        _run(RUNTIME.name, "cc", "-O2", "-fPIC", "-c", str(RUNTIME), "-o", str(path))

    return cached_file(f"{_hash(RUNTIME.read_text(), _toolchain())}-runtime.o", compile_to)


def _run(name: str, tool: str, *arguments: str) -> None:
    """Runs a tool on the kernel `name`. Raises LlvmError with the pass that failed and what it said."""
    done = subprocess.run([_tool(tool), *arguments], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    failed = re.search(r"IR Dump After (.*?) Failed", done.stderr)
    where = f"{tool}, in its pass {failed[1]}," if failed else tool
    said = done.stderr[: failed.start()] if failed else done.stderr
    raise LlvmError(f"{where} does not take {name}:\n{said[-3000:]}")


def _tool(name: str) -> str:
    path = find_tool(name)
    if path is None:
        raise LlvmError(f"{name} of LLVM 19 is not installed; `make test-ascend` installs it")
    return path


@functools.cache
def _toolchain() -> str:
    """Versions of all tools, and the processor that machine code is made for."""
    return "\n".join(subprocess.check_output([_tool(tool), "--version"], text=True) for tool in TOOLS)


@functools.cache
def _triple() -> str:
    return subprocess.check_output([_tool("llvm-config"), "--host-target"], text=True).strip()
