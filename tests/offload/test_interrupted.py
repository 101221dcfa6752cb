"""After a step that ends early, anywhere and by any error, the store is as if that step had never begun."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from tiers import sampled, slow

from fastattention.errors import CacheFullError
from offload.reference_cache import HEADDIM, HEADDIM_V, NHEADS_K, CachePair, page_shape

pytestmark = pytest.mark.usefixtures("small_buffers")

every_share = pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
# The fault comes before the failing call has done anything, or after it has done everything, with errors that are not
# ours.
every_fault = pytest.mark.parametrize(
    ("error", "late"),
    [(KeyboardInterrupt(), False), pytest.param(RuntimeError("lost"), True, marks=slow)],
    ids=["before", "after"],
)


def full(share: float, batch_size: int = 2, tokens: int = 30, num_layers: int = 4) -> CachePair:
    """A store with some of its layers in CPU memory."""
    pages, padding = (25 if num_layers > 1 else 8) * batch_size, [3, 0][:batch_size]
    pair = CachePair(num_layers, batch_size, page_shape(), pages, share=lambda layers, tokens: share, padding=padding)
    pair.append(tokens)
    pair.steps(3)
    assert any(pair.store.layers_on_cpu)
    return pair


def interrupt_everywhere(
    pair: CachePair, error: BaseException, late: bool, do: Callable[[], None], then: Callable[[], None]
) -> int:
    """Repeats an action, each time with a fault one call later, until none happens. Returns the number of faults."""
    for at in itertools.count():
        pair.device.faults.arm(at, error, late)
        with suppress(type(error)):
            do()
        if not pair.device.faults.fired:
            pair.device.faults.disarm()
            return at
        then()
        if pair.length > 37:
            pair.truncate(33)
    raise AssertionError


@sampled
@every_fault
@every_share
def test_a_step_is_undone_by_the_next(share: float, error: BaseException, late: bool) -> None:
    pair = full(share)

    def retry() -> None:
        assert pair.store.length == pair.length
        pair.attend(1)

    assert interrupt_everywhere(pair, error, late, lambda: pair.attend(1), retry) > 8


@sampled
@every_fault
@every_share
def test_a_step_of_several_tokens_is_undone_by_a_shorter_one(share: float, error: BaseException, late: bool) -> None:
    pair = full(share)
    assert interrupt_everywhere(pair, error, late, lambda: pair.attend(9), lambda: pair.attend(1)) > 8


@every_fault
@pytest.mark.parametrize(("num_layers", "batch_size"), [(4, 2), (1, 1)])
def test_a_prompt_is_undone_by_the_next(num_layers: int, batch_size: int, error: BaseException, late: bool) -> None:
    """The prompt of the only layer is appended in pieces; none of them stays."""
    pair = full(0.4, num_layers=num_layers, batch_size=batch_size)

    def retry() -> None:
        assert pair.store.length == pair.length
        pair.append(1)
        pair.attend(1)

    assert interrupt_everywhere(pair, error, late, lambda: pair.append(21), retry) > 8


@every_fault
@every_share
def test_sequences_are_selected_in_all_layers_or_in_none(share: float, error: BaseException, late: bool) -> None:
    pair = full(share)

    def steps() -> None:
        pair.padding = [3, 0]
        pair.attend(1)
        pair.select([1, 0])
        pair.select([1, 0])

    interrupt_everywhere(pair, error, late, lambda: pair.select([1, 0]), steps)


@every_fault
@pytest.mark.parametrize("length", [0, 6, 33])
@pytest.mark.parametrize("num_layers", [1, 4])
def test_truncating_is_finished_by_the_next_step(
    num_layers: int, length: int, error: BaseException, late: bool
) -> None:
    """Tokens that some layers have lost cannot be restored, so all layers drop them."""
    pair = full(0.4, num_layers=num_layers)

    def steps() -> None:
        if pair.store.length != pair.length:
            pair.k, pair.v = ([each[:, :length] for each in tensors] for tensors in (pair.k, pair.v))
        pair.attend(3)
        pair.append(max(40 - pair.length, 0))
        pair.truncate(40)

    interrupt_everywhere(pair, error, late, lambda: pair.truncate(length), steps)


@every_fault
def test_undoing_is_finished_by_the_next_step_when_it_is_interrupted(error: BaseException, late: bool) -> None:
    pair = full(0.4)

    def interrupted() -> None:
        last = pair.store._layers[-1]
        with pytest.MonkeyPatch.context() as patch, suppress(ZeroDivisionError):
            patch.setattr(last, "attend_on_device", lambda *args, **options: 1 // 0)
            pair.device.faults.disarm()
            pair.attend(6)

    def undo(at: int) -> None:
        interrupted()
        pair.device.faults.arm(at, error, late)
        with suppress(type(error)):
            pair.attend(1)

    for at in itertools.count():
        undo(at)
        if not pair.device.faults.fired:
            break
        pair.device.faults.disarm()
        pair.attend(1)
        pair.truncate(33)
    assert at > 8


def test_a_share_that_steps_have_changed_goes_on_after_interrupted_ones() -> None:
    pair = full(0.4)
    for at in range(0, 60, 7):
        pair.steps(4)
        pair.device.faults.arm(at, KeyboardInterrupt())
        with suppress(KeyboardInterrupt):
            pair.attend(1)
        pair.device.faults.disarm()
        pair.attend(1)
        pair.truncate(33)
    assert 0.0 < pair.store._staging.share < 1.0
    assert pair.store._staging.share != 0.4


@sampled
@every_share
def test_beams_after_an_interrupted_step(share: float) -> None:
    """Pages that an interrupted step took are not shared as if they held tokens."""
    for at in range(12):
        pair = full(share)
        pair.device.faults.arm(at, KeyboardInterrupt())
        with suppress(KeyboardInterrupt):
            pair.attend(9)
        pair.device.faults.disarm()
        pair.select([1, 1])
        pair.attend(1)
        pair.attend(2)


@every_fault
def test_a_layer_that_could_not_leave_leaves_later(error: BaseException, late: bool) -> None:
    for at in itertools.count():
        pair = CachePair(share=lambda layers, tokens: 0.5, gpu_pages=25)
        pair.attend(17)
        assert not any(pair.store.layers_on_cpu)
        pair.device.faults.arm(at, error, late)
        with suppress(type(error)):
            pair.attend(30)
        pair.device.faults.disarm()
        pair.attend(30 if pair.length == 17 else 1)
        assert any(pair.store.layers_on_cpu)
        if not pair.device.faults.fired:
            break
    assert at > 8


def test_host_memory_that_cannot_be_pinned_loses_nothing() -> None:
    pair = CachePair(gpu_pages=25, share=lambda layers, tokens: 0.5)
    pair.attend(17)
    pair.device.most_pinned = 0
    for _ in range(2):
        with pytest.raises(CacheFullError, match="cpu_memory"):
            pair.attend(30)
        pair.check()
    pair.attend(1)
    pair.device.most_pinned = None
    pair.attend(30)
    pair.steps(4)
    assert any(pair.store.layers_on_cpu)


def test_a_wrong_argument_in_a_later_layer_undoes_the_step() -> None:
    pair = full(0.4)
    k, v = torch.zeros(2, 1, NHEADS_K, HEADDIM), torch.zeros(2, 1, NHEADS_K, HEADDIM_V)
    pair.store.append(0, k, v)
    with pytest.raises(ValueError, match="k"):
        pair.store.append(1, k[..., :-1], v)
    pair.steps(3)
