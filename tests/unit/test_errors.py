"""The exception tree, as its file draws it."""

from __future__ import annotations

import pytest

import fastattention
from fastattention import ArgumentError, FastAttentionError, LibraryError, UnsupportedError


@pytest.mark.parametrize(
    ("error", "builtin"),
    [(ArgumentError, ValueError), (UnsupportedError, NotImplementedError), (LibraryError, RuntimeError)],
)
def test_every_error_is_ours_and_a_builtin(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, FastAttentionError)
    assert issubclass(error, builtin)
    with pytest.raises(FastAttentionError, match="what happened"):
        raise error("what happened")


def test_the_base_is_no_builtin_error() -> None:
    assert FastAttentionError.__bases__ == (Exception,)


def test_public_names_exist_and_are_sorted() -> None:
    assert sorted(fastattention.__all__) == fastattention.__all__
    for name in fastattention.__all__:
        assert hasattr(fastattention, name)
    assert fastattention.__version__
