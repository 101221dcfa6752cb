"""Tests run on the engines that they name."""

from __future__ import annotations

from conformance.engines import ENGINES, Engine, every_engine
from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.backends.cpu.library import load_library


def test_cpu_and_sdpa_run_everywhere() -> None:
    """A native library that does not load must fail this test instead of skipping others."""
    for backend in ("cpu", "sdpa"):
        assert ATTENTION_BACKENDS.get(backend).why_unavailable() is None
        assert backend in ATTENTION_BACKENDS.order


def test_every_instruction_set_is_an_engine() -> None:
    assert [engine.isa for engine in ENGINES if engine.backend == "cpu"] == load_library().isas


@every_engine
def test_an_engine_uses_its_instruction_set(engine: Engine) -> None:
    default = load_library().isa
    with engine.active():
        assert load_library().isa == (engine.isa or default)
        assert engine.isa is None or engine.isa in ATTENTION_BACKENDS.get(engine.backend).describe()
    assert load_library().isa == default
