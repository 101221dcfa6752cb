"""Peak memory is that of the moment between a reset and a reading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastattention.cli import peak_memory

MEGABYTE = 2**20
measurable = pytest.mark.skipif(peak_memory.why_unavailable() is not None, reason=str(peak_memory.why_unavailable()))


@measurable
def test_a_freed_tensor_stays_in_the_peak_until_the_reset() -> None:
    peak_memory.reset_peak()
    before = peak_memory.resident_bytes()
    torch.ones(64 * MEGABYTE, dtype=torch.uint8)
    assert 62 * MEGABYTE < peak_memory.peak_bytes() - before < 80 * MEGABYTE
    peak_memory.reset_peak()
    assert peak_memory.peak_bytes() - before < 32 * MEGABYTE


def test_a_system_without_it_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak_memory, "CLEAR_REFS", Path("/proc/no/such/file"))
    reason = peak_memory.why_unavailable()
    assert reason is not None
    assert "/proc/no/such/file" in reason
