"""That the tests run on what they say they run on."""

from __future__ import annotations

from conformance.engines import ENGINES, Engine, every_engine
from fastattention.backends.cpu.library import load_library
from fastattention.backends.registry import ORDER, get_backend


def test_cpu_and_sdpa_run_everywhere() -> None:
    """A native library that does not load must not turn into skipped tests."""
    for backend in ("cpu", "sdpa"):
        assert get_backend(backend).why_unavailable() is None
        assert backend in ORDER


def test_every_instruction_set_is_an_engine() -> None:
    assert [engine.isa for engine in ENGINES if engine.backend == "cpu"] == load_library().isas


@every_engine
def test_an_engine_uses_its_instruction_set(engine: Engine) -> None:
    default = load_library().isa
    with engine.active():
        assert load_library().isa == (engine.isa or default)
        assert engine.isa is None or engine.isa in get_backend(engine.backend).describe()
    assert load_library().isa == default
