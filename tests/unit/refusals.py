"""The errors of refused arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from fastattention import ArgumentError, FastAttentionError


class Refusal(NamedTuple):
    """One wrong argument: changes to a good call, and the words of the message."""

    says: tuple[str, ...]  # the argument, what was given, what is allowed
    changes: dict[str, Any]


def refused(*says: str, **changes: Any) -> Refusal:
    """A Refusal, as a row of a table."""
    return Refusal(says, changes)


def refusals(*rows: Refusal) -> pytest.MarkDecorator:
    """Parametrizes a test over `refusal`. Its ids are what the messages say."""
    return pytest.mark.parametrize("refusal", rows, ids=[", ".join(row.says) for row in rows])


def assert_refused(call: Callable[[], object], refusal: Refusal) -> None:
    """Asserts that the call raises ArgumentError with all required words."""
    with pytest.raises(ArgumentError) as raised:
        call()
    assert isinstance(raised.value, ValueError)
    assert isinstance(raised.value, FastAttentionError)
    for text in refusal.says:
        assert text in str(raised.value)
