"""register(), which vLLM calls in each of its processes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.metadata import entry_points

import pytest

pytest.importorskip("vllm")
import vllm
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

import fastattention_vllm
from fastattention_vllm import CPU_BACKEND, register
from fastattention_vllm.cpu import FastAttentionCpuBackend
from fastattention_vllm.cuda import FastAttentionCudaBackend
from fastattention_vllm.versions import TESTED, why_untested

BACKENDS = (AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum.CUSTOM)


@pytest.fixture(autouse=True)
def _nothing_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("FASTATTENTION_VLLM", raising=False)
    for backend in BACKENDS:
        backend.clear_override()
    yield
    for backend in BACKENDS:
        backend.clear_override()


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(
        fastattention_vllm.logger, "warning", lambda text, *values: texts.append(text % values if values else text)
    )
    return texts


def registered() -> list[str]:
    return [backend.name for backend in BACKENDS if backend.is_overridden()]


def test_entry_point_is_register() -> None:
    (entry_point,) = entry_points(group="vllm.general_plugins", name="fastattention")
    assert entry_point.load() is register


def test_cpu_replaces_cpu_attn() -> None:
    register()
    register()  # vLLM may call it more than once
    assert registered() == ["CPU_ATTN"]
    assert AttentionBackendEnum.CPU_ATTN.get_path() == CPU_BACKEND
    assert AttentionBackendEnum.CPU_ATTN.get_class() is FastAttentionCpuBackend


def test_nvidia_gpu_gets_custom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    register()
    register()
    assert registered() == ["CUSTOM"]
    assert AttentionBackendEnum.CUSTOM.get_class() is FastAttentionCudaBackend


def test_custom_of_another_plugin_stays(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    register_backend(AttentionBackendEnum.CUSTOM, "another.Backend")
    register()
    assert AttentionBackendEnum.CUSTOM.get_path() == "another.Backend"
    assert "another.Backend" in warnings[0]


def test_other_platforms_get_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    register()
    assert registered() == []


def test_0_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTENTION_VLLM", "0")
    register()
    assert registered() == []


def test_other_settings_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTENTION_VLLM", "off")
    with pytest.raises(ValueError, match=r"FASTATTENTION_VLLM='off' is not allowed; use 0 .* or 1"):
        register()


def test_untested_version_keeps_vllms_attention(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    register()
    assert registered() == []
    assert "0.99.0" in warnings[0]
    assert TESTED[0] in warnings[0]
    monkeypatch.setenv("FASTATTENTION_VLLM", "1")
    register()
    assert registered() == ["CPU_ATTN"]
    assert len(warnings) == 2


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu"])
def test_local_versions_count_as_tested(version: str) -> None:
    assert why_untested(version) is None


@pytest.mark.parametrize("version", ["0.32.1", "0.32.0rc1", "0.33.0", "dev", ""])
def test_other_versions_are_untested(version: str) -> None:
    assert "was not tested" in (why_untested(version) or "")


def test_logger_belongs_to_vllm() -> None:
    assert isinstance(fastattention_vllm.logger.parent, logging.Logger)
    assert fastattention_vllm.logger.name.startswith("vllm.")
