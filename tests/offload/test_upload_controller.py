"""The share of a hybrid converges to that of the fastest step, for any prediction."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiers import deep, sampled, slow

from fastattention.offload import upload_controller
from fastattention.offload.device import CpuJob, CudaDevice, Span, Upload
from fastattention.offload.upload_controller import MOST_CHANGE, MOST_WAITING, LayerTiming, UploadController
from offload.fake_device import FakeDevice, Rates
from offload.reference_cache import CachePair
from offload.timed_store import S, TimedStore, W, hybrid_share

pytestmark = pytest.mark.usefixtures("small_buffers")

# Layers, how many of them on the CPU, and bytes a second of the link and the CPU: balanced, slow CPU, all on the CPU.
MACHINES = {
    "4 of 16 layers": (16, 4, S / 8, 3 * S / 8),
    "slow CPU": (16, 4, S / 20, S / 40),
    "all layers": (8, 8, S / 8, 3 * S / 8),
}
every_machine = pytest.mark.parametrize("machine", MACHINES)
SETTLING, STEPS = 14, 4  # steps before those that are timed, and timed steps


@functools.cache
def balanced(machine: str) -> float:
    """Seconds of a step with the fastest share, which test_step_time.py checks, when none share."""
    num_layers, on_cpu, *rates = MACHINES[machine]
    return fixed(num_layers, on_cpu, hybrid_share(num_layers, on_cpu, *rates), Rates(*rates))


def fixed(num_layers: int, on_cpu: int, share: float, rates: Rates) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upload_controller, "GAIN", 0.0)
        timed = TimedStore(num_layers, on_cpu, share, rates)
        timed.steps(SETTLING)
        return timed.steps(STEPS)


@slow
@sampled
@every_machine
@pytest.mark.parametrize("wrong", [0.7, 1.3])
@pytest.mark.parametrize("part", ["link", "cpu"])
def test_wrong_bandwidths_cost_next_to_nothing(machine: str, part: str, wrong: float) -> None:
    num_layers, on_cpu, link, cpu = MACHINES[machine]
    believed = (wrong * link, cpu) if part == "link" else (link, wrong * cpu)
    share = hybrid_share(num_layers, on_cpu, *believed)
    assert share < 1.0
    timed = TimedStore(num_layers, on_cpu, share, Rates(link, cpu))
    timed.steps(SETTLING)
    assert timed.steps(STEPS) < 1.03 * balanced(machine)


@every_machine
def test_the_right_prediction_stays(machine: str) -> None:
    num_layers, on_cpu, *rates = MACHINES[machine]
    share = hybrid_share(num_layers, on_cpu, *rates)
    timed = TimedStore(num_layers, on_cpu, share, Rates(*rates))
    for _ in range(SETTLING):
        timed.step()
        assert timed.last_share == pytest.approx(share, abs=0.03)
    assert timed.steps(STEPS) < 1.02 * balanced(machine)


@slow
@every_machine
def test_a_link_that_slows_down_is_followed(machine: str) -> None:
    num_layers, on_cpu, link, cpu = MACHINES[machine]
    timed = TimedStore(num_layers, on_cpu, hybrid_share(num_layers, on_cpu, 1.4 * link, cpu), Rates(1.4 * link, cpu))
    timed.steps(4)
    timed.device.rates.link = link
    timed.steps(SETTLING)
    assert timed.steps(STEPS) < 1.03 * balanced(machine)


@every_machine
@pytest.mark.parametrize("part", ["link", "cpu"])
def test_a_step_in_which_the_host_stalls_does_not_throw_it_off(machine: str, part: str) -> None:
    num_layers, on_cpu, link, cpu = MACHINES[machine]
    timed = TimedStore(num_layers, on_cpu, hybrid_share(num_layers, on_cpu, link, cpu), Rates(link, cpu))
    before = timed.steps(6)
    share = timed.last_share
    setattr(timed.device.rates, part, 0.02 * getattr(timed.device.rates, part))
    assert timed.step() > 5 * before
    timed.device.rates = Rates(link, cpu)
    for _ in range(SETTLING):
        timed.step()
        assert abs(timed.last_share - share) < 2.5 * MOST_CHANGE  # the next step uses its late uploads
    assert timed.steps(STEPS) < 1.03 * balanced(machine)


def seconds_in_halves(num_layers: int, share: float, rates: Rates) -> float:
    """Seconds of a step of two stores with all layers on the CPU, which share the device and alternate by layer."""
    device = FakeDevice(rates)
    halves = [TimedStore(num_layers, num_layers, share, rates, device) for _ in range(2)]
    begin = computed = device.now
    for number in range(SETTLING + STEPS):
        ends = [device.now] * 2  # one for the queue of each
        begin = device.now if number == SETTLING else begin
        for index in range(num_layers):
            for half, timed in enumerate(halves):
                device.now = computed = max(computed, ends[half]) + W
                timed.attend(index)
                ends[half] = device.now
        device.now = max(ends)
    return (device.now - begin) / STEPS


@slow
@pytest.mark.parametrize(
    ("ratio", "wrong"),
    [(0.7, 1.3), *(pytest.param(*each, marks=deep) for each in ((0.7, 0.7), (2.0, 0.7), (2.0, 1.3)))],
)
def test_two_stores_share_link_and_cpu(monkeypatch: pytest.MonkeyPatch, ratio: float, wrong: float) -> None:
    rates = Rates(S / 8, ratio * S / 8)
    seconds = seconds_in_halves(8, wrong / (1 + ratio), rates)
    monkeypatch.setattr(upload_controller, "GAIN", 0.0)
    assert seconds < 1.03 * seconds_in_halves(8, 1 / (1 + ratio), rates)


class NeverOver(FakeDevice):
    """A device whose events never happen."""

    over = False

    def seconds_between(self, begin: Any, end: Any) -> float | None:
        return super().seconds_between(begin, end) if self.over else None


def test_events_that_are_not_over_are_not_waited_for_nor_kept_without_end() -> None:
    num_layers, on_cpu, link, cpu = MACHINES["all layers"]
    device = NeverOver(Rates(link, cpu))
    timed = TimedStore(num_layers, on_cpu, 0.6, device.rates, device)
    seconds = timed.steps(10)
    assert timed.last_share == 0.6
    assert len(timed.store._controller._waiting) == MOST_WAITING
    assert seconds == pytest.approx(fixed(num_layers, on_cpu, 0.6, device.rates), rel=0.05)
    device.over = True
    timed.steps(SETTLING)
    assert timed.steps(STEPS) < 1.03 * balanced("all layers")


class CudaEvent:
    """An event of a GPU; asking for a time that is not known raises, and it cannot be waited for."""

    def __init__(self, milliseconds: float | None) -> None:
        self.milliseconds = milliseconds

    def query(self) -> bool:
        return self.milliseconds is not None

    def elapsed_time(self, end: CudaEvent) -> float:
        assert self.milliseconds is not None
        assert end.milliseconds is not None
        return end.milliseconds - self.milliseconds


def test_a_gpu_is_asked_for_times_that_it_has() -> None:
    device = CudaDevice.__new__(CudaDevice)
    early, late, never = CudaEvent(1.0), CudaEvent(3.5), CudaEvent(None)
    assert device.seconds_between(early, late) == pytest.approx(2.5e-3)
    assert device.seconds_between(late, early) == pytest.approx(-2.5e-3)
    assert device.seconds_between(early, never) is None
    assert device.seconds_between(never, late) is None


class Times:
    """A device whose events are times."""

    def seconds_between(self, begin: float, end: float) -> float:
        return end - begin


def make_controller() -> UploadController:
    return UploadController(Times())  # type: ignore[arg-type]


def timing(uploads: Sequence[tuple[float, float]], on_cpu: tuple[float, float]) -> LayerTiming:
    """The timing of a visit in which 40 of 100 tokens were uploaded, after an upload that ended at 0."""
    ends = [0.0, *(end for _, end in uploads)]
    return LayerTiming(
        [Upload(before, *one) for before, one in zip(ends, uploads, strict=False)], Span(*on_cpu), 40, 60
    )


def step(found: UploadController, *visits: LayerTiming | None, predicted: float = 0.4) -> float:
    """Runs a step with these visits, and returns its share."""
    share = found.begin_step(predicted, 1000)
    for visit in visits:
        found.observe(visit)
    found.end_step()
    return share


EVEN = timing([(4.0, 8.0)], (2.0, 8.0))
LATE = timing([(4.0, 8.0)], (3.0, 9.0))


def share_after(*visits: LayerTiming | None) -> float:
    """The share after a step with these visits, which follows another one, has been evaluated."""
    found = make_controller()
    step(found, EVEN)
    step(found, *visits)
    step(found)
    return found.begin_step(0.4, 1000)


# Uploads take 4 s, and the CPU 6, except for the last one: every token takes 0.1 s on either.
@pytest.mark.parametrize(
    ("visit", "best"),
    [
        pytest.param(timing([(4.0, 6.0), (6.0, 8.0)], (3.0, 9.0)), 0.45, id="the CPU ends 1 s late, the link was idle"),
        pytest.param(timing([(0.5, 2.5), (2.5, 4.5)], (3.0, 9.0)), 0.425, id="the link was idle for 0.5 s only"),
        pytest.param(timing([(0.0, 2.0), (2.0, 4.0)], (3.0, 9.0)), 0.4, id="uploads are ahead of a busy link"),
        pytest.param(timing([(4.0, 8.0), (8.0, 10.0)], (3.0, 9.0)), 0.36, id="uploads of 6 s end 1 s late"),
        pytest.param(EVEN, 0.4, id="both end at once"),
    ],
)
def test_half_the_way_to_the_share_with_which_both_end_at_once(visit: LayerTiming, best: float) -> None:
    assert share_after(visit, visit) == pytest.approx(0.4 + (best - 0.4) / 2)


@pytest.mark.parametrize(
    ("visit", "seconds"),
    [
        pytest.param(timing([(1000.0, 1004.0)], (3.0, 9.0)), -4.0, id="uploads that began late, by what they took"),
        pytest.param(timing([(500.0, 504.0)], (1000.0, 1006.0)), 6.0, id="a CPU that began late, by what it took"),
    ],
)
def test_a_visit_counts_by_no_more_than_it_took(visit: LayerTiming, seconds: float) -> None:
    best = (8 * 40 + seconds / 0.2) / 800
    assert share_after(visit, *[EVEN] * 7) == pytest.approx(0.4 + (best - 0.4) / 2)


def test_one_step_changes_little_however_long_it_took() -> None:
    for stalled in (timing([(4.0, 8.0)], (0.0, 1e6)), timing([(4.0, 1e6)], (0.0, 6.0))):
        assert abs(share_after(stalled) - 0.4) <= MOST_CHANGE + 1e-9


@pytest.mark.parametrize(
    "visits", [(), (None,), (LATE, None), (None, LATE)], ids=["none", "whole", "last whole", "first whole"]
)
def test_steps_in_which_a_layer_had_one_part_alone_do_not_count(visits: tuple[LayerTiming | None, ...]) -> None:
    assert share_after(LATE) > 0.4
    assert share_after(*visits) == 0.4


def test_an_interrupted_step_does_not_count_nor_does_the_one_after_it() -> None:
    found = make_controller()
    step(found, EVEN)
    found.begin_step(0.4, 1000)
    found.observe(LATE)
    step(found, LATE)
    step(found, EVEN)
    assert step(found) == 0.4
    step(found, EVEN)
    step(found, LATE)
    step(found)
    assert step(found) > 0.4


def test_the_first_step_of_a_hybrid_does_not_count() -> None:
    found = make_controller()
    step(found, None)
    step(found, LATE)
    step(found)
    assert step(found) == 0.4


@pytest.mark.parametrize("predicted", [0.0, 1.0])
def test_what_is_no_hybrid_is_not_corrected(predicted: float) -> None:
    found = make_controller()
    for _ in range(4):
        step(found, LATE)
    assert step(found, predicted=predicted) == predicted
    assert step(found, predicted=predicted) == predicted


def test_the_correction_stays_when_the_prediction_moves() -> None:
    found = make_controller()
    for _ in range(4):
        step(found, LATE)
    assert found.begin_step(0.4, 1000) > 0.43
    assert found.begin_step(0.4, 1000) / 0.4 == pytest.approx(found.begin_step(0.2, 1000) / 0.2)


@pytest.mark.parametrize("num_pages", [1, 2, 3, 50])
def test_a_hybrid_leaves_a_page_to_either(num_pages: int) -> None:
    found = make_controller()
    shares = [found.begin_step(predicted, num_pages) for predicted in (0.001, 0.4, 0.999)]
    pages = {round(share * num_pages) for share in shares}
    assert pages <= (set(range(1, num_pages)) or {0, 1})


class Wavering(FakeDevice):
    """A device whose link and CPU are fast and slow in turns, so that the share keeps changing."""

    jobs = 0

    def run_on_cpu(self, job: CpuJob, nbytes: int, after: Sequence[Any]) -> Span:
        self.jobs += 1
        slow = self.jobs // 24 % 2
        self.rates = Rates(1e4, 3e3) if slow else Rates(4e3, 3e4)
        return super().run_on_cpu(job, nbytes, after)


@pytest.mark.parametrize("cache_dtype", [pytest.param(None, marks=slow), torch.int8], ids=["as q", "int8"])
def test_results_are_right_while_the_share_moves(cache_dtype: torch.dtype | None) -> None:
    """With chunks prefetched for an earlier share, no token is left out or attended to twice."""
    pair = CachePair(batch_size=2, gpu_pages=60, share=lambda layers, tokens: 0.5, padding=[3, 0], device=Wavering())
    pair.append(120)
    shares = set()
    for number in range(60):
        pair.attend(1)
        shares.add(pair.store._staging.share)
        if number % 9 == 5:
            pair.truncate(pair.length - 5)
        if number % 11 == 7:
            pair.select([1, 0] if number % 2 else [1, 1])
    assert max(shares) - min(shares) > 0.15


def test_a_share_that_moves_uploads_nothing_in_vain() -> None:
    """Prefetched chunks are used even if the share has changed when their step begins."""
    pair = CachePair(gpu_pages=25, share=lambda layers, tokens: 0.5, device=Wavering())
    pair.append(120)
    pair.steps(4)
    assert all(pair.store.layers_on_cpu)
    staging, device = pair.store._staging, pair.device
    issued = sum(visit.issued for visit in staging._visits)
    uploaded, used, shares = device.uploaded_bytes, 0, set()
    for _ in range(30):
        pair.attend(1)
        used += sum(visit.uploaded_tokens for visit in pair.store._controller._visits if visit is not None)
        shares.add(staging.share)
    ahead = sum(visit.issued for visit in staging._visits) - issued
    assert len(shares) > 5
    assert device.uploaded_bytes - uploaded == (used + ahead) * pair.shape.token_bytes
