"""The emulator's bulk copies and flags, and each detector on a kernel with one fault."""

from __future__ import annotations

import functools

import numpy as np
import probing
import pytest
from emulator import EmulatorError
from probing import CTA, NONE, WARP, aligned

probe = functools.partial(probing.probe, file="bulk_probes")

# The thread that copies, and another.
THREADS = [(0, 1), (3, 40), (40, 3), (63, 0)]


@pytest.mark.parametrize("first", [0, 5, 31, 63])
def test_every_thread_sees_what_has_come_in_every_phase(first: int) -> None:
    """A thread may wait before or after the copying thread starts the copy."""
    source = aligned(np.random.default_rng(first).integers(0, 1 << 32, (5, 16), np.uint32))
    out = aligned(np.zeros((5, 64), np.uint32))
    probe("phases", source, out, first=first)
    np.testing.assert_array_equal(out, np.tile(source, 4))


@pytest.mark.parametrize("first", [0, 40])
def test_a_phase_may_have_no_bytes(first: int) -> None:
    probe("nothing", first=first)


def test_copies_are_carried_out_as_late_as_can_be() -> None:
    out = aligned(np.zeros(64, np.uint32))
    probe("late", target=out, first=40)
    np.testing.assert_array_equal(out, 9)


@pytest.mark.parametrize("name", ["wait_then_another_reads", "read_then_bulk_copy", "begin_then_expect"])
@pytest.mark.parametrize(("first", "second"), THREADS)
def test_a_race_is_found(name: str, first: int, second: int) -> None:
    with pytest.raises(EmulatorError, match=rf"thread ({first}|{second}) .*shared memory at \d+"):
        probe(name, first=first, second=second, barrier=NONE)
    probe(name, first=first, second=second, barrier=CTA)
    if first // 32 != second // 32:
        with pytest.raises(EmulatorError, match=rf"thread ({first}|{second}) .*shared memory at \d+"):
            probe(name, first=first, second=second, barrier=WARP)


COUNTER = 1024 + 8192 - 8

FAULTS = {
    "no_wait": "thread 9 reads shared memory at 1024 under an asynchronous copy that thread 0 has not waited for",
    "wait_for_the_other_phase": "thread 9 reads shared memory at 1024 under an asynchronous copy",
    "wait_for_phase_two": "waits for a phase by 2, which is not a bit",
    "more_expected": f"waits for 48 bytes at the counter at {COUNTER}, of which 16 were asked for",
    "less_expected": f"waits for 16 bytes at the counter at {COUNTER}, of which 48 were asked for",
    "nobody_expects": f"waits for bytes that nobody expects, at the counter at {COUNTER}",
    "wait_for_one_phase_too_many": f"waits for bytes that nobody expects, at the counter at {COUNTER}",
    "expect_twice": f"expects bytes at the counter at {COUNTER}, whose phase before nobody has waited for",
    "begin_twice": f"thread 0 begins the counter at {COUNTER}, which has begun",
    "expect_before_the_beginning": f"thread 0 reads shared memory at {COUNTER}, which nobody wrote",
    "expect_where_none_begins": f"uses shared memory at {COUNTER} as a counter of bulk copies, which it is not",
    "copy_where_none_begins": f"uses shared memory at {COUNTER} as a counter of bulk copies, which it is not",
    "wait_where_none_begins": f"uses shared memory at {COUNTER} as a counter of bulk copies, which it is not",
    "misaligned_counter": f"writes 8 bytes of shared memory at {COUNTER - 4}, which is not a multiple of 8",
    "size_of_24": "thread 0 copies 24 bytes, which is not a multiple of 16",
    "misaligned_source": r"copies 32 bytes of global memory at 0x\w+, which is not a multiple of 16",
    "misaligned_target": "copies 32 bytes of shared memory at 1032, which is not a multiple of 16",
    "source_outside": r"copies 32 bytes of global memory at 0x\w+, which is in none of the ranges",
    "target_outside": r"copies 32 bytes of shared memory at 9200, outside of 1024 \.\.\. 9215",
    "written_meanwhile": "thread 9 writes shared memory at 1024 under an asynchronous copy that thread 0 has not",
    "two_copies_to_a_place": "thread 0 writes shared memory at 1040 under an asynchronous copy",
    "return_before_the_end": f"returned as the last, and nobody has waited for the counter at {COUNTER}",
    "raise_without_fence": "stores a flag without a system_fence since the last barrier of its CTA",
    "raise_with_a_fence_before_the_barrier": "stores a flag without a system_fence since the last barrier of its CTA",
    "raise_what_was_loaded": "thread 0 stores a flag without a system_fence since it loaded a flag",
    "read_without_fence": "thread 0 reads without a system_fence since it loaded a flag",
    "wait_without_fence": "thread 0 waits for others without a system_fence since it loaded a flag",
    "copy_without_bulk_fence": "thread 0 starts a bulk copy without a bulk_fence since its CTA loaded a flag",
    "gives_up": "cta 0, thread 33 gave up",
}


@pytest.mark.parametrize(("name", "message"), FAULTS.items(), ids=FAULTS.keys())
def test_a_fault_is_found(name: str, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        probe(name)


def test_a_launch_after_an_error_starts_afresh() -> None:
    for name in ("no_wait", "more_expected", "copy_without_bulk_fence"):
        with pytest.raises(EmulatorError):
            probe(name)
        test_every_thread_sees_what_has_come_in_every_phase(0)


@pytest.mark.parametrize(("first", "second"), THREADS)
def test_a_thread_that_waits_for_a_flag_lets_others_go_on(first: int, second: int) -> None:
    out = aligned(np.zeros(2, np.int32))
    probe("meet", target=out, first=first, second=second)
    np.testing.assert_array_equal(out, [1, 5])


def test_time_passes() -> None:
    probe("time_passes")
