"""scripts/write_model_types.py: the page agrees with the sweep for each type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import write_model_types

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


@pytest.mark.parametrize(("result", "cells"), OUTCOMES.values(), ids=OUTCOMES)
def test_a_type_stands_where_it_belongs(result: dict[str, Any], cells: str, request: pytest.FixtureRequest) -> None:
    result = {"class": "Model", **result}
    expected = request.node.callspec.id
    assert write_model_types.outcome(result) == expected
    page = write_model_types.render({"versions": {"transformers": "5", "torch": "2"}, "types": {"some": result}})
    title = write_model_types.SECTIONS[expected].title
    assert f"| [{title}](#" in page
    assert page.count("\n## ") == 1
    assert "| `some` |" in page
    assert f"{cells} |" in page


def test_linear_layers_are_listed_with_what_computed_them() -> None:
    linear = {
        "some": {"ours": ["chunk_kda", "recurrent_kda"], "left": []},
        "other": {
            "ours": [],
            "left": ["fastattention.linear leaves Mamba-2 to the model itself: A is float64; use ours"],
        },
    }
    types: dict[str, Any] = {
        name: {"class": "M", "checks": {"greedy": "same"}, "linear": found} for name, found in linear.items()
    }
    page = write_model_types.render({"versions": {"transformers": "5", "torch": "2"}, "types": types})
    assert "\n\n## Linear layers\n\n" in page
    assert "| `some` | `chunk_kda`, `recurrent_kda` | - |\n" in page
    assert "| `other` | none | `Mamba-2: A is float64` |\n" in page


def test_latents_are_listed_with_what_became_of_them() -> None:
    types = {"some": {"class": "M", "checks": {"greedy": "same"}, "latents": ["absorbed", "indexer"]}}
    page = write_model_types.render({"versions": {"transformers": "5", "torch": "2"}, "types": types})
    assert "\n\n## Latents and selected keys\n\n" in page
    assert "| `some` | absorbed, indexer |\n" in page


def test_a_stale_page_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_model_types, "PAGE", tmp_path / "page.md")
    assert write_model_types.main(["--check"]) == 1
    assert write_model_types.main([]) == 0
    assert write_model_types.main(["--check"]) == 0
