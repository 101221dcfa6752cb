"""scripts/write_model_types.py: the page says of each type what the sweep found."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "write_model_types.py"
OUTCOMES: dict[str, tuple[dict[str, Any], str]] = {
    "served": ({"checks": {"greedy": "same", "beams": "eager fails: ValueError: no", "asks": "yes"}}, "all but beams"),
    "own": ({"checks": {"greedy": "same", "asks": "no"}}, "`Model`"),
    "partly": (
        {"checks": {"greedy": "same", "packing": "refused: UnsupportedError: not | that; use this", "asks": "yes"}},
        "packing | `not / that`",
    ),
    "refused": ({"checks": {"loading": "refused: UnsupportedError: has a table"}}, "`has a table`"),
    "wrong": ({"checks": {"greedy": "same", "beams": "error: KeyError: 'x'", "asks": "yes"}}, "beams | `'x'`"),
    "untried": ({"cannot": "its main input is input_features"}, "`its main input is input_features`"),
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_model_types", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("result", "cells"), OUTCOMES.values(), ids=OUTCOMES)
def test_a_type_stands_where_it_belongs(
    result: dict[str, Any], cells: str, script: ModuleType, request: pytest.FixtureRequest
) -> None:
    result = {"class": "Model", **result}
    expected = request.node.callspec.id
    assert script.outcome(result) == expected
    page = script.render({"versions": {"transformers": "5", "torch": "2"}, "types": {"some": result}})
    title = script.SECTIONS[expected].title
    assert f"| [{title}](#" in page
    assert page.count("\n## ") == 1
    assert "| `some` |" in page
    assert f"{cells} |" in page


def test_a_stale_page_is_found(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    assert script.main(["--check"]) == 1
    assert script.main([]) == 0
    assert script.main(["--check"]) == 0
