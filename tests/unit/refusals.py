"""The errors of refused arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from fastattention import ArgumentError, FastAttentionError


class Refusal(NamedTuple):
    """One wrong argument: changes to a good call, and the words of the message."""

    name: str  # the test's id
    changes: dict[str, Any]
    says: tuple[str, ...]  # the argument, what was given, what is allowed


def refusals(*cases: Refusal) -> pytest.MarkDecorator:
    """Parametrises a test over `refusal`."""
    return pytest.mark.parametrize("refusal", cases, ids=[case.name for case in cases])


def assert_refused(call: Callable[[], object], refusal: Refusal) -> None:
    """Asserts that the call raises ArgumentError with all required words."""
    with pytest.raises(ArgumentError) as raised:
        call()
    assert isinstance(raised.value, ValueError)
    assert isinstance(raised.value, FastAttentionError)
    for text in refusal.says:
        assert text in str(raised.value)
