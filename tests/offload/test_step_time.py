"""On the fake clock a step takes the time of the model: copies and the CPU overlap.

With N layers of w seconds, L of them in CPU memory with S bytes each, b_P and b_C bytes a second of the link and of the
CPU, tau seconds of handing over, and T0 = N w:

    classical, all uploaded         max(T0, L S / b_P)
    cooperative, nothing uploaded   T0 + L (S / b_C + tau)
    hybrid, the link always busy    T0 + max(0, (L S - b_P T0) / (b_C + b_P)), which uploads b_P T / (L S) of each
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from offload.fake_device import Rates
from offload.timed_store import SHAPE, S, TimedStore, W, hybrid_share

pytestmark = pytest.mark.usefixtures("small_buffers")

STEPS, STEADY = 8, 4  # all steps, and the last ones, which count

every_link = pytest.mark.parametrize("link", [S / 2, S / 8, S / 20], ids=["fast link", "link", "slow link"])
every_ratio = pytest.mark.parametrize("ratio", [0.5, 3.0, 9.0])


class Run(NamedTuple):
    """The behaviour of a store in the steady state."""

    step: float  # seconds
    link: float  # share of the time in which it was busy with uploads
    buffers: float  # bytes


def run(num_layers: int, on_cpu: int, share: float, link: float, cpu: float, handover: float = 0.0) -> Run:
    """Measures the last of some steps."""
    timed = TimedStore(num_layers, on_cpu, share, Rates(link, cpu, handover))
    timed.steps(STEPS - STEADY)
    uploaded = timed.device.uploaded_bytes
    seconds = timed.steps(STEADY)
    busy = (timed.device.uploaded_bytes - uploaded) / link / STEADY / seconds
    store = timed.store
    return Run(seconds, busy, store.usage.gpu_bytes - store._gpu.used * SHAPE.nbytes)


@every_link
@pytest.mark.parametrize(("num_layers", "on_cpu"), [(16, 4), (15, 3), (16, 2)])
def test_classical(num_layers: int, on_cpu: int, link: float) -> None:
    model = max(num_layers * W, on_cpu * S / link)
    found = run(num_layers, on_cpu, 1.0, link, cpu=1.0)
    assert found.step == pytest.approx(model, rel=0.04)


@every_link
@every_ratio
@pytest.mark.parametrize("handover", [0.0, 0.3])
def test_cooperative(link: float, ratio: float, handover: float) -> None:
    model = 16 * W + 4 * (S / (ratio * link) + handover)
    found = run(16, 4, 0.0, link, ratio * link, handover)
    assert found.step == pytest.approx(model, rel=0.04)
    assert found.link == 0.0


@every_link
@every_ratio
@pytest.mark.parametrize(("num_layers", "on_cpu"), [(16, 4), (15, 3), (16, 5)])
def test_hybrid(num_layers: int, on_cpu: int, link: float, ratio: float) -> None:
    """The link is busy from the beginning of the step to its end."""
    t0, cpu = num_layers * W, ratio * link
    model = t0 + max(0.0, (on_cpu * S - link * t0) / (cpu + link))
    share = hybrid_share(num_layers, on_cpu, link, cpu)
    found = run(num_layers, on_cpu, share, link, cpu)
    assert found.step == pytest.approx(model, rel=0.04)
    if share < 1.0:
        assert found.link > 0.95


@pytest.mark.parametrize("link", [S / 1.5, S / 2, S / 3])
def test_buffers_too_small_for_the_time_between_two_layers_leave_the_link_idle(link: float) -> None:
    """No store does better: tokens that do not fit the buffers are uploaded when their layer runs."""
    found = run(8, 4, 1.0, link, cpu=1.0)
    between = 2 * W
    assert found.buffers < S
    assert found.buffers / link < between or link == S / 3
    waiting = (S - found.buffers) / link
    assert found.step == pytest.approx(4 * (max(between, found.buffers / link) + waiting), rel=0.05)
