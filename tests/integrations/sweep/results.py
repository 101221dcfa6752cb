"""The results of the sweep, in results.json: by type, with the versions of the packages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

PATH = Path(__file__).with_name("results.json")


def versions() -> dict[str, str]:
    """Versions of the packages that results depend on."""
    return {"transformers": transformers.__version__, "torch": torch.__version__}


def read() -> dict[str, Any]:
    """Results by type; none if there are none yet."""
    return dict(json.loads(PATH.read_text(encoding="utf-8"))["types"]) if PATH.exists() else {}


def write(types: dict[str, Any]) -> None:
    """Writes all results, by name, with current versions."""
    ordered = {name: types[name] for name in sorted(types)}
    temporary = PATH.with_suffix(".tmp")
    temporary.write_text(json.dumps({"versions": versions(), "types": ordered}, indent=1) + "\n", encoding="utf-8")
    temporary.replace(PATH)


def is_failure(result: dict[str, Any]) -> bool:
    """Whether a type gave other values, or an exception that is not ours."""
    return any(said.startswith(("error", "differs")) for said in result.get("checks", {}).values())
