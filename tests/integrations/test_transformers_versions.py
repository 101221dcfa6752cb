"""Supported versions of Transformers, and their name of a cache."""

from __future__ import annotations

import inspect
import warnings

import pytest
import transformers

from fastattention.integrations.transformers import versions


def test_the_argument_of_a_cache_is_one_of_models() -> None:
    assert versions.CACHE_ARGUMENT in inspect.signature(transformers.LlamaModel.forward).parameters


@pytest.mark.parametrize("version", ["5.17.0", "5.23.0.dev0", "4.57.1"])
def test_one_that_is_too_old_is_told(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.transformers, "__version__", version)  # several modules have this name
    with pytest.warns(UserWarning, match=rf"Transformers {version} is older than 5\.23.*'transformers>=5\.23'"):
        versions.warn_of_old_version()


@pytest.mark.parametrize("version", ["5.23.0", "5.24.0", "6.0.0", transformers.__version__])
def test_others_are_taken_in_silence(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.transformers, "__version__", version)  # several modules have this name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn_of_old_version()
