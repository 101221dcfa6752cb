"""The kernels' source keeps to what upstream Triton and every release of Triton-Ascend share. Needs neither of them."""

from __future__ import annotations

import ast
from pathlib import Path

import fastattention

SOURCE = Path(fastattention.__file__).parent / "backends" / "ascend" / "kernels.py"

# Not among them on purpose: exp2, which Triton-Ascend is known to compile wrongly; extract_slice and others that only
# it has, which have moved between its releases; tl.math, whose contents differ.
OPERATIONS = frozenset(
    "abs arange cdiv constexpr dot exp float32 full int64 load log make_block_ptr max maximum num_programs program_id "
    "store sum trans where zeros".split()
)
BUILTINS = frozenset({"min", "max", "range", "float"})  # functions of single values


def kernel_functions() -> list[ast.FunctionDef]:
    """Functions that Triton compiles."""
    tree = ast.parse(SOURCE.read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [function for function in functions if function.decorator_list]


def language(function: ast.FunctionDef) -> set[str]:
    """Names of the module `tl` that a function uses."""
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tl"
    }


def called(function: ast.FunctionDef) -> set[str]:
    """Names that a function calls and that belong to no module."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    return {node.func.id for node in calls if isinstance(node.func, ast.Name)}


def test_kernels_use_no_other_operations() -> None:
    used = {function.name: language(function) - OPERATIONS for function in kernel_functions()}
    assert used.keys() >= {"attention_forward", "merge_splits"}
    assert {name: names for name, names in used.items() if names} == {}


def test_every_operation_of_the_list_is_used() -> None:
    assert set().union(*map(language, kernel_functions())) == OPERATIONS


def test_kernels_call_nothing_but_each_other_and_the_shared_functions() -> None:
    own = {function.name for function in kernel_functions()}
    shared = {"first_key", "past_last_key", "window_row", "window_column"}
    for function in kernel_functions():
        assert called(function) <= own | shared | BUILTINS, function.name


def test_kernels_import_nothing_of_one_triton_alone() -> None:
    imports = [
        node for node in ast.walk(ast.parse(SOURCE.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    names = {ast.unparse(node) for node in imports if "triton" in ast.unparse(node)}
    assert names == {"import triton", "import triton.language as tl"}
