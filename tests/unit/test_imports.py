"""Imports point down, and importing the package stays light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastattention

PACKAGE = Path(fastattention.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# A module may import from its own layer and from those below it. The package itself stands for its public functions.
LAYERS = (
    ("errors", "environment", "sizes", "files"),
    ("gpu_runtime",),
    ("engine",),
    (
        "attention.problem",
        "attention.mask_tiles",
        "linear.problem",
        "convolution.problem",
        "indexer.problem",
        "attention.selection.problem",
        "threads",
        "quantized",
        "host_numbers",
    ),
    (
        "backends",
        "attention.backend",
        "attention.reference",
        "linear.backend",
        "linear.reference",
        "convolution.backend",
        "convolution.reference",
        "indexer.backend",
        "attention.selection.backend",
        "indexer.reference",
    ),
    ("attention", "linear", "convolution", "indexer", "sparse", "kv_store", ""),
    ("distributed", "offload", "testing"),
    ("integrations",),
    ("cli",),
    ("__main__",),
)
# Modules that every backend may use. The rest of backends/ chooses among backends, which must not import it.
SHARED_BY_BACKENDS = ("backends.common",)


def module_name(path: Path) -> str:
    """Name below the package: "backends.sdpa.masks"; "" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(source: str) -> Iterator[str]:
    """Names, relative to the package, of all our modules that `source` imports anywhere."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] == "fastattention":
                below = name.removeprefix("fastattention").removeprefix(".")
                yield below if (PACKAGE / below.split(".")[0]).exists() or is_module(below) else ""


def is_module(below: str) -> bool:
    return (PACKAGE / f"{below.split('.')[0]}.py").exists()


def layer(module: str) -> int:
    """Height of the longest prefix of `module` that LAYERS names."""
    parts = module.split(".")
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next(height for prefix in prefixes for height, names in enumerate(LAYERS) if prefix in names)


def violations(module: str, source: str) -> list[str]:
    """The wrong imports of `module`."""
    found = [f"{module} imports {name} of a layer above" for name in imported(source) if layer(name) > layer(module)]
    backend = re.match(r"backends\.(?!common)(\w+)\.", module + ".")
    if backend and (PACKAGE / "backends" / backend[1]).is_dir():
        allowed = (*SHARED_BY_BACKENDS, f"backends.{backend[1]}")
        found += [
            f"{module} imports {name}, which is no part of the backend"
            for name in imported(source)
            if name.startswith("backends") and not name.startswith(allowed)
        ]
    return found


@pytest.mark.parametrize("path", MODULES, ids=[module_name(path) or "fastattention" for path in MODULES])
def test_imports_point_down(path: Path) -> None:
    assert violations(module_name(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine.registry", "from fastattention.attention.problem import Problem"),
        ("attention.problem", "from fastattention.attention.interface import explain"),
        ("errors", "import fastattention.attention.problem"),
        ("attention.operators", "from fastattention import cli"),
        ("attention.validation.common", "def f():\n    from fastattention.integrations import transformers"),
        ("backends.sdpa.backend", "from fastattention import fast_attn_func"),
        ("backends.sdpa.masks", "from fastattention.backends.cpu.attention.backend import CpuBackend"),
        ("kv_store.dense", "from fastattention.offload.placement import place"),
        ("offload.placement", "from fastattention.cli import console"),
        ("integrations.transformers.serving.server", "from fastattention.cli import console"),
        ("backends.cpu.backend", "from fastattention.backends import sdpa"),
    ],
)
def test_an_import_that_points_up_or_across_is_found(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("attention.interface", "from fastattention.engine.operator import request_of"),
        ("cli.main", "from fastattention import fast_attn_func"),
        ("integrations.transformers", "from fastattention.offload.placement import place"),
        ("backends.sdpa.masks", "from fastattention.backends.common.tile_range import TileRange"),
        ("backends.sdpa.masks", "from fastattention.backends.sdpa.parts import Part"),
        ("backends.cpu.backend", "import torch, fastattention.errors"),
    ],
)
def test_an_import_that_points_down_is_allowed(module: str, source: str) -> None:
    assert violations(module, source) == []


def modules_after(*statements: str) -> list[set[str]]:
    """Modules loaded in a fresh interpreter after each statement."""
    code = "import sys\n" + "".join(f"{statement}\nprint(*sys.modules)\n" for statement in statements)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return [set(line.split()) for line in result.stdout.splitlines()]


def test_the_package_and_a_call_load_only_what_they_need() -> None:
    call = "fastattention.fast_attn_func(q, q, q, block_mask=torch.ones(1, 1, 1, 1) > 0, backend='sdpa')"
    loaded, after_a_call = modules_after("import fastattention", f"import torch; q = torch.zeros(1, 1, 1, 8); {call}")
    assert "fastattention.attention.interface" in loaded
    assert not loaded & {"transformers", "matplotlib", "typer", "rich", "click", "flash_attn", "fastattention.cli"}
    assert not [name for name in loaded if re.match(r"fastattention\.backends\.(cpu|sdpa)", name)]
    assert not loaded & {"fastattention.integrations", "fastattention.distributed", "fastattention.offload"}
    assert "fastattention.backends.sdpa.backend" in after_a_call
    assert "fastattention.backends.cpu.attention.backend" not in after_a_call
    assert "torch.nn.attention.flex_attention" not in after_a_call  # to see that the mask is none of its BlockMasks
