"""Resident memory of this process, and its peak since a chosen moment (Linux)."""

from __future__ import annotations

from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


def why_unavailable() -> str | None:
    """Why peak memory cannot be measured on this system, or None. Resets the peak when it can."""
    try:
        reset_peak()
    except OSError as error:
        return f"peak memory needs Linux with a writable {CLEAR_REFS}: {error}"
    return None


def reset_peak() -> None:
    """Let the peak start again from what is resident now. Raises OSError where the kernel does not offer that."""
    CLEAR_REFS.write_text("5")


def resident_bytes() -> int:
    """Bytes resident now. The kernel counts in batches: expect an error of up to a megabyte."""
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """The most bytes ever resident at once since `reset_peak`."""
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    for line in STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"{STATUS} has no field {field}")
