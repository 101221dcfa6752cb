"""docs/internals/adding-a-backend.md: the backend on the page exists as written and keeps every promise."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.cases import CASES
from conformance.check import check
from conformance.engines import Engine
from tiers import Tier, deep, slow, tier_of

from fastattention import backends
from fastattention.attention.backend import ATTENTION_BACKENDS, AttentionBackend
from fastattention.attention.merge import select_merging_backend
from fastattention.attention.problem import Problem
from fastattention.engine.operator import forget_plans
from fastattention.engine.registry import Registry
from fastattention.testing.calls import problem_of

PAGE = (Path(__file__).parents[2] / "docs" / "internals" / "adding-a-backend.md").read_text()
# A block of code begins with the path of its file.
BLOCKS = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
PLAIN = Engine("plain")


def order_on_the_page() -> dict[str, str]:
    names: dict[str, Any] = {"Registry": Registry, "Problem": Problem, "AttentionBackend": AttentionBackend}
    exec(BLOCKS["fastattention/attention/backend.py"], names)
    order: dict[str, str] = names["ATTENTION_BACKENDS"].order
    return order


@pytest.fixture(autouse=True)
def _page_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Follows the page: writes the class into its file and registers it."""
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "__init__.py").write_text('"""Attention in plain torch."""\n')
    (folder / "backend.py").write_text(BLOCKS["fastattention/backends/plain/backend.py"])
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(tmp_path)])
    monkeypatch.setattr(ATTENTION_BACKENDS, "order", order_on_the_page())
    forget()
    yield
    forget()


def forget() -> None:
    """Removes the page's backend from this process."""
    ATTENTION_BACKENDS.forget()
    ATTENTION_BACKENDS.forget()
    select_merging_backend.cache_clear()
    forget_plans()
    for name in ("plain", "plain.backend"):
        sys.modules.pop(f"fastattention.backends.{name}", None)
    vars(backends).pop("plain", None)


def test_the_page_adds_one_backend_to_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    order = order_on_the_page()
    assert order.pop("plain") == "fastattention.backends.plain.backend:PlainBackend"
    monkeypatch.undo()
    assert list(order.items()) == list(ATTENTION_BACKENDS.order.items())


def test_the_call_on_the_page_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    exec(BLOCKS["example.py"], {})
    (wanted,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert capsys.readouterr().out == wanted


@slow
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=deep)], ids=["float32", "bfloat16"]
)
def test_the_backend_of_the_page_passes_conformance(request: pytest.FixtureRequest, dtype: torch.dtype) -> None:
    served = [case for case in CASES if PLAIN.refusal(problem_of(case, dtype)) is None]
    features = {feature for case in served for feature in ("causal", "window") if getattr(case, feature)}
    assert features == {"causal", "window"}
    assert any(case.name.startswith("heads-") for case in served)
    for case in served[:: 1 if tier_of(request.config) is Tier.DEEP else 5]:
        check(PLAIN, case, dtype)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("varlen", "varlen calls"),
        ("append-one", "kvcache calls"),
        ("softcap", "softcap"),
        ("alibi-causal", "alibi_slopes"),
        ("bias-causal", "attn_bias"),
        ("sinks", "sinks"),
        ("everything", "alibi_slopes and attn_bias and sinks and softcap=3.0"),
    ],
)
def test_the_backend_of_the_page_refuses_by_name(name: str, reason: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    refusal = PLAIN.refusal(problem_of(case, torch.float32))
    assert reason in refusal
