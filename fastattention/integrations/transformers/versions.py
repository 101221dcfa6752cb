"""Supported versions of Transformers, and names that differ among them."""

from __future__ import annotations

import inspect
import warnings

import transformers
from packaging.version import Version
from transformers import masking_utils

OLDEST = "5.23"  # the oldest version with which the tests pass
NAME = "fast_attention"  # without "flash": Transformers takes any name that contains it for flash-attn

_NAMES = inspect.signature(masking_utils.create_causal_mask).parameters

# The argument of models and of `generate` that is their cache: renamed in Transformers 5.24, where the old name warns.
CACHE_ARGUMENT = "cache" if "cache" in _NAMES else "past_key_values"


def warn_of_old_version() -> None:
    """Warns of a Transformers older than OLDEST."""
    if Version(transformers.__version__) < Version(OLDEST):
        warnings.warn(
            f"Transformers {transformers.__version__} is older than {OLDEST}, the oldest that fast_attention supports: "
            "variable-length sequences and assisted generation fail with it; upgrade by "
            f"pip install --upgrade 'transformers>={OLDEST}'",
            stacklevel=3,
        )
