"""What a refused argument must look like to the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from fastattention import ArgumentError, FastAttentionError


class Refusal(NamedTuple):
    """One wrong argument: a good call with `changes`, and what the message must say."""

    name: str  # the test's id
    changes: dict[str, Any]
    says: tuple[str, ...]  # the argument, what was given, what is allowed


def refusals(*cases: Refusal) -> pytest.MarkDecorator:
    """Parametrises a test over `refusal`."""
    return pytest.mark.parametrize("refusal", cases, ids=[case.name for case in cases])


def assert_refused(call: Callable[[], object], refusal: Refusal) -> None:
    """Asserts that the call raises ArgumentError and that its message says all it must."""
    with pytest.raises(ArgumentError) as raised:
        call()
    assert isinstance(raised.value, ValueError)
    assert isinstance(raised.value, FastAttentionError)
    for text in refusal.says:
        assert text in str(raised.value)
