"""scripts/check_factories.py: tensors that a default of the user would change are found."""

from __future__ import annotations

from pathlib import Path

import check_factories
import pytest


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("torch.empty(3)", "no device and no dtype"),
        ("torch.tensor([1.0], dtype=torch.float32)", "no device"),
        ("torch.rand(3, device=x.device)", "no dtype"),
        ("torch.arange(3)", "no device"),
        ("torch.Generator()", "no device"),
        ("f(torch.zeros(3, device=d))", "no dtype"),
        ("torch.arange(3, device=d)", None),
        ("torch.empty(3, dtype=t, device=d)", None),
        ("torch.empty(3, **like)", None),
        ('torch.Generator("cpu")', None),
        ("x.new_empty(3)", None),
        ("numpy.zeros(3)", None),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, line: str, missing: str | None) -> None:
    path = tmp_path / "some.py"
    path.write_text(f"import torch\ny = {line}\n")
    found = list(check_factories.findings(path))
    assert len(found) == (missing is not None)
    assert missing is None or found[0].endswith(f"names {missing}")
