"""Runs types of Transformers one by one: those that are named, or all that have no result yet."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import sys
import time
import warnings
from typing import Any

import torch
import transformers

from integrations.models import own_linear_layers

from . import results
from .checks import run
from .latents import WAYS, recorded_ways
from .linear import recorded
from .tiny import CannotBuildError, build, model_types


def sweep(model_type: str) -> dict[str, Any]:
    """The result of one type: {"class", "checks"}, or {"cannot": why}.

    "linear" is added for linear layers, and "latents" for latents and selected keys.
    """
    try:
        with own_linear_layers():
            tiny = build(model_type)
    except CannotBuildError as error:
        return {"cannot": str(error)}
    with recorded() as linear, recorded_ways() as ways:
        result: dict[str, Any] = {"class": tiny.model_class.__name__, "checks": run(tiny)}
    if linear.is_there(tiny.config):
        result["linear"] = linear.result()
    if ways:
        result["latents"] = [way for way in WAYS if way in ways]
    return result


def main(names: list[str]) -> int:
    """Returns 1 when a type that was run failed."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = results.read()
    wanted = names or [name for name in model_types() if name not in found]
    failed = False
    for name in wanted:
        start = time.monotonic()
        with contextlib.redirect_stdout(io.StringIO()):  # some models print
            found[name] = sweep(name)
        results.write(found)
        failed |= results.is_failure(found[name])
        print(f"{time.monotonic() - start:5.1f} s  {name}: {found[name]}", flush=True)
        gc.collect()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
