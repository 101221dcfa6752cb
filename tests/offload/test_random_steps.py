"""Any order of prompts, steps, truncations, selections and failures, with budgets that are often too small."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastattention.errors import CacheFullError
from offload.reference_cache import CachePair, page_shape

pytestmark = pytest.mark.usefixtures("small_buffers")

MOST_TOKENS = 70
DTYPES = st.sampled_from([None, None, torch.int8, torch.float8_e4m3fn])


class RandomSteps(RuleBasedStateMachine):
    """A store and plain tensors that hold the same, compared by CachePair."""

    pair: CachePair

    @initialize(data=st.data())
    def make(self, data: st.DataObject) -> None:
        draw = data.draw
        torch.manual_seed(draw(st.integers(0, 1 << 16)))
        num_layers, batch_size = draw(st.integers(1, 5)), draw(st.integers(1, 3))
        page_size, share = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([0.0, 0.3, 1.0]))
        self.pair = CachePair(
            num_layers,
            batch_size,
            page_shape(torch.float32, draw(DTYPES), page_size),
            gpu_pages=(num_layers + 6) * batch_size + draw(st.integers(0, 30)),
            cpu_pages=draw(st.sampled_from([0, 100, 100000])) * num_layers // page_size,
            share=lambda layers, tokens: share,
            padding=draw(st.lists(st.integers(0, 20), min_size=batch_size, max_size=batch_size) | st.none()),
        )

    @rule(tokens=st.integers(1, 6) | st.just(1) | st.integers(1, 40))
    def step(self, tokens: int) -> None:
        with suppress(CacheFullError):
            self.pair.attend(tokens)

    @rule(tokens=st.integers(1, 60))
    def append(self, tokens: int) -> None:
        with suppress(CacheFullError):
            self.pair.append(tokens)

    @precondition(lambda self: self.pair.shape.cache_dtype is None)  # tokens come back rounded from quantized pages
    @rule(tokens=st.integers(1, 12), at=st.integers(0, 40), late=st.booleans(), attends=st.booleans())
    def interrupted(self, tokens: int, at: int, late: bool, attends: bool) -> None:
        self.pair.device.faults.arm(at, KeyboardInterrupt(), late)
        with suppress(KeyboardInterrupt, CacheFullError):
            if attends:
                self.pair.attend(tokens)
            else:
                self.pair.append(tokens)
        self.pair.device.faults.disarm()
        assert self.pair.store.length == self.pair.length

    @rule(back=st.integers(1, 9))
    def forget_a_few(self, back: int) -> None:
        self.pair.truncate(max(self.pair.length - back, 0))

    @rule(part=st.floats(0, 1))
    def truncate(self, part: float) -> None:
        self.pair.truncate(int(part * self.pair.length))

    @rule(data=st.data())
    def beams(self, data: st.DataObject) -> None:
        rows = st.integers(0, self.pair.batch_size - 1)
        self.pair.select(data.draw(st.lists(rows, min_size=self.pair.batch_size, max_size=self.pair.batch_size)))

    @rule(data=st.data())
    def another_batch_size(self, data: st.DataObject) -> None:
        rows = st.integers(0, self.pair.batch_size - 1)
        with suppress(CacheFullError):
            self.pair.select(data.draw(st.lists(rows, min_size=1, max_size=4)))

    @precondition(lambda self: self.pair.length > MOST_TOKENS)
    @rule()
    def start_again(self) -> None:
        self.pair.truncate(0)

    @invariant()
    def lengths_agree(self) -> None:
        if hasattr(self, "pair"):
            assert self.pair.store.length == self.pair.length


TestRandomSteps = RandomSteps.TestCase
TestRandomSteps.settings = settings(
    max_examples=max(settings.default.max_examples // 3, 1),
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
