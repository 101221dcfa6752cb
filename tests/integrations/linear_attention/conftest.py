from __future__ import annotations

from unittest.mock import Mock

import pytest
from transformers.integrations import hub_kernels

from fastattention.integrations.transformers import linear_layers

from .calls import RULES, Calls


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls([], [])
    for kind, mocks in calls._asdict().items():
        for rule in RULES:
            mocks.append(Mock(wraps=getattr(linear_layers, f"{kind}_{rule}")))
            monkeypatch.setattr(linear_layers, f"{kind}_{rule}", mocks[-1])
    return calls


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Records warnings of Transformers and ours."""
    mock = Mock()
    monkeypatch.setattr(hub_kernels.logger, "warning_once", mock)
    monkeypatch.setattr(linear_layers._log, "warning_once", mock)
    return mock
