"""What Transformers calls by other names from one version to the next."""

from __future__ import annotations

import inspect

from transformers import masking_utils

_NAMES = inspect.signature(masking_utils.create_causal_mask).parameters

# The argument of models and of `generate` that is their cache: renamed in Transformers 5.24, where the old name warns.
CACHE_ARGUMENT = "cache" if "cache" in _NAMES else "past_key_values"
