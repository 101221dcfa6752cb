"""Functions of models are found and wrapped, whatever the order of imports, and unwrapped ones stay as they are."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.integrations import hub_kernels
from transformers.models.qwen3_next import modeling_qwen3_next

from fastattention.integrations.transformers import linear_attention, serve_linear_attention

from .calls import Calls, arguments, by_torch


def another_copy(name: str) -> ModuleType:
    """The modelling module of Qwen3-Next, executed once more under another name."""
    path = modeling_qwen3_next.__file__
    assert path is not None
    spec = importlib.util.spec_from_file_location(f"{modeling_qwen3_next.__package__}.{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("first", ["module", "integration"])
def test_the_order_of_imports_does_not_matter(
    first: str, calls: Calls, warned: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    if first == "module":
        factory = hub_kernels.use_kernel_func_from_hub_with_fallback.__wrapped__  # as it was
        monkeypatch.setattr(hub_kernels, "use_kernel_func_from_hub_with_fallback", factory)
        monkeypatch.setattr(transformers.integrations, "use_kernel_func_from_hub_with_fallback", factory)
    module = another_copy(f"imported_before_{first}")
    try:
        if first == "module":
            module.torch_chunk_gated_delta_rule(**arguments())
            assert calls.counts == (0, 0)
            assert "falling back" in warned.call_args.args[0]
            warned.reset_mock()
            serve_linear_attention()
        module.torch_chunk_gated_delta_rule(**arguments())
        module.torch_recurrent_gated_delta_rule(**arguments())
    finally:
        del sys.modules[module.__name__]
    assert calls.counts == (1, 1)
    assert not warned.called


def test_repeated_calls_wrap_once() -> None:
    before = modeling_qwen3_next.torch_chunk_gated_delta_rule, hub_kernels.use_kernel_func_from_hub_with_fallback
    serve_linear_attention()
    after = modeling_qwen3_next.torch_chunk_gated_delta_rule, hub_kernels.use_kernel_func_from_hub_with_fallback
    assert before == after


def test_functions_of_others_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(torch_chunk_gated_delta_rule=arguments)
    monkeypatch.setitem(sys.modules, "a_model_of_a_user", module)
    serve_linear_attention()
    assert module.torch_chunk_gated_delta_rule is arguments


def test_ours_comes_before_flash_linear_attention(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, gk: None = None, beta: Tensor | None = None) -> Any:
        return g, gk, beta

    monkeypatch.setitem(sys.modules, "fla", SimpleNamespace(fused_recurrent_gated_delta_rule=theirs))
    decorator = hub_kernels.use_kernel_func_from_hub_with_fallback("fused_recurrent_gated_delta_rule", "fla")
    function = decorator(modeling_qwen3_next.torch_recurrent_gated_delta_rule.__wrapped__)
    given = arguments()
    qkv = [given.pop(name) for name in ("query", "key", "value")]
    function(*qkv, **given)
    assert calls.counts == (0, 1)
    assert by_torch(lambda: function(*qkv, **given)) == (given["g"], None, given["beta"])


@pytest.mark.parametrize("first", ["module", "integration"])
def test_functions_that_kernels_made_modules_are_served(
    first: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package `kernels` makes an instance of a class of its own, and replaces the forward of the instance."""

    def as_kernels_do(function: Callable[..., Any]) -> nn.Module:
        class Func(nn.Module):
            kernel_layer_name = "chunk_gated_delta_rule"

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs)

        return Func()

    if first == "integration":
        monkeypatch.setattr(hub_kernels, "use_kernel_forward_from_hub", lambda name: as_kernels_do)
        decorator = hub_kernels.use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")
        layer = decorator(lambda query, *_, **__: query)
    else:
        layer = as_kernels_do(lambda query, *_, **__: query)
        monkeypatch.setitem(sys.modules, "a_module", SimpleNamespace(torch_chunk_gated_delta_rule=layer))
        for _ in range(2):
            serve_linear_attention()
    given = arguments()
    assert layer(**given)[0].shape == given["value"].shape
    assert calls.counts == (1, 0)
    assert by_torch(lambda: layer(**given)) is given["query"]
    layer.forward = lambda **_: "of the hub"
    assert layer(**given) == "of the hub"
    assert calls.counts == (1, 0)


def test_a_transformers_without_the_decorator_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(hub_kernels, "use_kernel_func_from_hub_with_fallback")
    warning = Mock()
    monkeypatch.setattr(linear_attention._log, "warning", warning)
    serve_linear_attention()
    assert "has no use_kernel_func_from_hub_with_fallback" in warning.call_args.args[0]


def test_switched_off_models_compute_as_before(calls: Calls, warned: Mock) -> None:
    by_torch(lambda: modeling_qwen3_next.torch_chunk_gated_delta_rule(**arguments() | {"max_length_q": None}))
    assert calls.counts == (0, 0)
    assert "falling back" in warned.call_args.args[0]
    modeling_qwen3_next.torch_chunk_gated_delta_rule(**arguments())
    assert calls.counts == (1, 0)


def test_export_keeps_the_form_of_torch(calls: Calls) -> None:
    class Rule(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            return modeling_qwen3_next.torch_recurrent_gated_delta_rule(query, key, value, g=g, beta=beta)[0]

    given = {name: value for name, value in arguments(3).items() if isinstance(value, Tensor)}
    program = torch.export.export(Rule(), (), given)
    assert calls.counts == (0, 0)
    assert "fastattention" not in program.graph_module.code
