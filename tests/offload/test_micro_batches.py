"""Works that run at once: their results, exceptions and modes, their work on the CPU, and the predicted step."""

from __future__ import annotations

import contextlib
import contextvars
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattention.offload.cpu_attention_queue import CpuAttentionQueue
from fastattention.offload.device import CpuJob
from fastattention.offload.hardware import PRESETS as MACHINES
from fastattention.offload.hardware import Hardware
from fastattention.offload.memory import OffloadWorkload
from fastattention.offload.micro_batches import run_together
from fastattention.offload.model_shape import PRESETS
from fastattention.offload.policy import Policy
from fastattention.offload.prediction import seconds_per_token, seconds_per_token_in_halves, upload_fraction
from fastattention.threads import get_num_threads, set_num_threads

from .fake_device import FakeDevice

LONG = 30.0  # seconds after which an event that should happen at once counts as missing
SHORT = 0.1  # seconds within which a forbidden event would have happened


def test_results_are_in_the_order_of_the_works() -> None:
    second_done = threading.Event()

    def first() -> str:
        assert second_done.wait(LONG)
        return "first"

    def second() -> str:
        second_done.set()
        return "second"

    assert run_together(FakeDevice(), [first, second]) == ["first", "second"]
    assert run_together(FakeDevice(), []) == []


def test_works_run_at_once_in_threads_and_branches_of_their_own() -> None:
    device, both = FakeDevice(), threading.Barrier(3)

    def work() -> int:
        both.wait(LONG)  # passes only while all of them run
        return threading.get_ident()

    threads = run_together(device, [work] * 3)
    assert len({*threads, threading.get_ident()}) == 4
    assert sorted(device.branches) == [0, 1, 2]


@pytest.mark.parametrize("fails", [False, True])
def test_works_begin_after_the_caller_and_the_caller_goes_on_after_them(fails: bool) -> None:
    device = FakeDevice()
    device.compute(5.0)

    def work(seconds: float) -> float:
        begun = device.now
        device.compute(seconds)
        if fails:
            raise ValueError("of a work")
        return begun

    with pytest.raises(ValueError, match="of a work") if fails else contextlib.nullcontext():
        assert run_together(device, [lambda: work(1.0), lambda: work(3.0)]) == [5.0, 5.0]
    assert device.now == 8.0


def test_tensors_that_are_returned_are_adopted_by_the_caller() -> None:
    device, tensors = FakeDevice(), [torch.zeros(1) for _ in range(4)]
    run_together(device, [lambda: tensors[0], lambda: {"out": (tensors[1], [tensors[2]]), "other": 3}])
    assert [id(tensor) for tensor in device.adopted] == [id(tensor) for tensor in tensors[:3]]


class Slow:
    """A work that ends late: it checks whether the caller came back before it ended."""

    def __init__(self, begin: threading.Event) -> None:
        self._begin = begin
        self.returned = threading.Event()
        self.abandoned: bool | None = None

    def __call__(self) -> None:
        assert self._begin.wait(LONG)
        self.abandoned = self.returned.wait(SHORT)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("position", [0, 1])
def test_an_exception_is_raised_once_all_have_ended(error: type[BaseException], position: int) -> None:
    failing = threading.Event()
    slow = Slow(failing)

    def fail() -> None:
        failing.set()
        raise error("of a work")

    works: list[Callable[[], None]] = [slow, fail] if position else [fail, slow]
    with pytest.raises(error, match="of a work"):
        run_together(FakeDevice(), works)
    slow.returned.set()
    assert slow.abandoned is False


def test_of_several_exceptions_the_first_in_order_is_raised() -> None:
    second_failed = threading.Event()

    def first() -> None:
        assert second_failed.wait(LONG)
        raise ValueError("first")

    def second() -> None:
        second_failed.set()
        raise ValueError("second")

    with pytest.raises(ValueError, match="first"):
        run_together(FakeDevice(), [first, second])


def wait_until_main_thread_waits() -> None:
    main = threading.main_thread().ident or 0
    for _ in range(1_000_000):
        frame = sys._current_frames()[main]
        if any(frame.f_code is futures.wait.__code__ for frame, _ in traceback.walk_stack(frame)):
            return
    raise AssertionError("the main thread waits for no work")


def test_a_caller_who_is_interrupted_twice_waits_for_all() -> None:
    told, both_told = threading.Semaphore(0), threading.Event()
    slow = Slow(both_told)

    def tell(*_: object) -> None:
        told.release()
        raise KeyboardInterrupt

    def interrupt() -> None:
        wait_until_main_thread_waits()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def interrupt_twice() -> None:
        for _ in range(2):
            interrupt()
            while not told.acquire(timeout=SHORT):  # Python does not see one that comes just before a thread blocks
                interrupt()
        both_told.set()

    before = signal.signal(signal.SIGINT, tell)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_together(FakeDevice(), [slow, interrupt_twice])
    finally:
        signal.signal(signal.SIGINT, before)
    slow.returned.set()
    assert slow.abandoned is False


setting = contextvars.ContextVar("setting", default="none")


def modes() -> tuple[object, ...]:
    """All modes that a forward pass may depend on, in this thread."""
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast if autocast[0] else None,
        torch.ones(1).device,
        setting.get(),
    )


@contextlib.contextmanager
def gradients_off_and_on() -> Iterator[None]:
    with torch.no_grad(), torch.enable_grad():
        yield


@contextlib.contextmanager
def other_setting() -> Iterator[None]:
    token = setting.set("other")
    yield
    setting.reset(token)


@pytest.mark.parametrize(
    "mode",
    [
        contextlib.nullcontext,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.float16),
        lambda: torch.device("meta"),
        other_setting,
        gradients_off_and_on,
    ],
    ids=["none", "no_grad", "inference_mode", "autocast", "device", "context variable", "gradients off and on"],
)
def test_modes_are_those_of_the_caller(mode: Callable[[], Any]) -> None:
    with mode():
        assert run_together(FakeDevice(), [modes, modes]) == [modes()] * 2


QUERIES = torch.zeros(1, 1, 2, 4)


class Work:
    """Work of the CPU that calls any function."""

    function = argument = 0

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run

    def run(self) -> None:
        self._run()

    def check(self) -> None:
        pass


def enqueue_attention(device: FakeDevice, work: Callable[[int], object]) -> None:
    """Enqueues work on the CPU, which gets its number of threads."""

    def prepare(q: Tensor, out: Tensor, lse: Tensor, num_threads: int) -> Work:
        return Work(lambda: work(num_threads))

    CpuAttentionQueue(device).attend(QUERIES, 4, 0, prepare)


def test_all_threads_but_one_attend() -> None:
    counts: list[int] = []
    set_num_threads(8)
    try:
        run_together(FakeDevice(), [lambda: enqueue_attention(FakeDevice(), counts.append)] * 2)
        assert (counts, get_num_threads()) == ([7, 7], 8)
    finally:
        set_num_threads(None)


def test_waiting_for_the_device_keeps_nobody_from_the_cpu() -> None:
    waiting, attended = threading.Event(), threading.Event()

    class LateDevice(FakeDevice):
        def run_on_cpu(self, job: CpuJob, nbytes: int, after: Sequence[Any]) -> Any:
            waiting.set()
            assert attended.wait(LONG)
            return super().run_on_cpu(job, nbytes, after)

    def second() -> None:
        assert waiting.wait(LONG)
        enqueue_attention(FakeDevice(), lambda _: attended.set())

    run_together(FakeDevice(), [lambda: enqueue_attention(LateDevice(), lambda _: None), second])


K = 1024
LLAMA = OffloadWorkload(PRESETS["llama-3-8b"], batch_size=8, seqlen=32 * K)
H200 = MACHINES["h200"]
AMPLE = 1 << 40  # bytes of buffers: uploads never wait for room


def pipeline(segments: int, gpu: float, cpu: float) -> float:
    """The end of two halves that take turns: each computes on the GPU, then the CPU attends, `segments` times."""
    free = {"gpu": 0.0, "cpu": 0.0}
    ready = [0.0, 0.0]
    for _ in range(segments):
        for where, seconds in (("gpu", gpu), ("cpu", cpu)):
            for half in range(2):
                free[where] = ready[half] = max(free[where], ready[half]) + seconds
    return max(ready)


@pytest.mark.parametrize("num_layers_cpu", [1, 2, 8, 32])
@pytest.mark.parametrize("cpu_bandwidth", [20e9, 150e9, 199e9, 2e13])
def test_a_cooperative_step_in_halves_is_that_of_a_pipeline(num_layers_cpu: int, cpu_bandwidth: float) -> None:
    hardware = replace(H200, cpu_bandwidth=cpu_bandwidth, dram_bandwidth=max(200e9, cpu_bandwidth))
    half = replace(LLAMA, batch_size=4)
    whole = seconds_per_token(Policy.COOPERATIVE, half, hardware, num_layers_cpu, AMPLE)
    cpu = hardware.handover_seconds + half.cpu_layer_bytes / cpu_bandwidth
    gpu = whole / num_layers_cpu - cpu
    seconds = seconds_per_token_in_halves(Policy.COOPERATIVE, LLAMA, hardware, num_layers_cpu, AMPLE)
    assert seconds == pytest.approx(pipeline(num_layers_cpu, gpu, cpu))


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("batch_size", [2, 7])
def test_no_part_of_the_machine_does_more_than_it_can(policy: Policy, batch_size: int) -> None:
    selected_keys = 2 * K if policy is Policy.GATHERED else 0
    work = replace(LLAMA, batch_size=batch_size, model=replace(LLAMA.model, selected_keys=selected_keys))
    seconds = seconds_per_token_in_halves(policy, work, H200, 8, AMPLE)
    weights = work.model.num_layers * work.model.layer_weight_bytes
    assert seconds > 2 * weights / H200.gpu_bandwidth
    uploaded = upload_fraction(policy, work, H200, 8, AMPLE, seconds_per_token_in_halves)
    if policy is Policy.GATHERED:
        assert seconds >= 8 * work.gathered_bytes / H200.link_bandwidth > 0
    elif policy is not Policy.RESIDENT:
        cpu_bytes = 8 * work.cpu_layer_bytes
        assert seconds >= uploaded * cpu_bytes / H200.link_bandwidth * (1 - 1e-9)
        assert seconds >= (1 - uploaded) * cpu_bytes / H200.cpu_bandwidth


def halves_pay(*given: Any) -> bool:
    return seconds_per_token_in_halves(*given) < seconds_per_token(*given)


def test_halves_pay_where_the_cpu_takes_longer_than_reading_weights_again() -> None:
    assert halves_pay(Policy.COOPERATIVE, LLAMA, H200, 8, AMPLE)
    assert halves_pay(Policy.HYBRID, LLAMA, H200, 8, AMPLE)
    short = replace(LLAMA, seqlen=K, batch_size=2)
    assert not halves_pay(Policy.COOPERATIVE, short, H200, 1, AMPLE)
    for policy in (Policy.RESIDENT, Policy.CLASSICAL):  # nothing to overlap with
        assert not halves_pay(policy, short, H200, 1, AMPLE)


def test_a_single_sequence_has_no_halves() -> None:
    single = replace(LLAMA, batch_size=1)
    expected = seconds_per_token(Policy.COOPERATIVE, single, H200, 8, AMPLE)
    assert seconds_per_token_in_halves(Policy.COOPERATIVE, single, H200, 8, AMPLE) == expected
    assert not halves_pay(Policy.COOPERATIVE, single, H200, 8, AMPLE)


def test_where_the_cpu_takes_longest_the_time_of_the_gpu_is_hidden() -> None:
    even = Hardware("even", 1e12, 1e10, 4e10, 4.5e10, handover_seconds=0.0, layer_overhead_seconds=0.0)
    plain = seconds_per_token(Policy.COOPERATIVE, LLAMA, even, 32, AMPLE)
    cpu = 32 * LLAMA.cpu_layer_bytes / 4e10
    halves = seconds_per_token_in_halves(Policy.COOPERATIVE, LLAMA, even, 32, AMPLE)
    assert cpu < halves < cpu + (plain - cpu) / 8
