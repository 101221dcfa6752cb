"""torch_npu in this process: whether it is installed, and its import without CANN."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import warnings
from pathlib import Path

import pytest

from ascend.vendor import acl_stub, communication, inference, selection, training, training_gradients


def skip_without_torch_npu() -> None:
    """Skips the module that calls this where torch_npu is not installed, and makes torch_npu ready where it is."""
    if importlib.util.find_spec("torch_npu") is None:
        pytest.skip("torch_npu is not installed; `make test-ascend` installs it", allow_module_level=True)
    import_torch_npu()


@functools.cache
def import_torch_npu() -> None:
    """Imports torch_npu, with stubs where there is no CANN, and registers its operators for tensors on a CPU."""
    spec = importlib.util.find_spec("torch_npu")
    assert spec is not None
    assert spec.origin is not None
    if "ASCEND_HOME_PATH" not in os.environ:  # CANN sets it
        acl_stub.load(Path(spec.origin).parent)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch_npu's, none of them about us
        importlib.import_module("torch_npu")
    # Shape inference asks the NPU for its version before it warns, once, of trouble on another chip.
    inference_of_shapes = importlib.import_module("torch_npu.op_plugin.meta._meta_registrations")
    inference_of_shapes._npu_fusion_attention_warning_printed = True  # type: ignore[attr-defined]
    training.register()
    training_gradients.register()
    inference.register()
    communication.register()
    selection.register()
