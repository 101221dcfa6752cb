"""A store on the fake device whose steps are timed: every layer takes W seconds besides its attention."""

from __future__ import annotations

import torch

from fastattention.offload.kv_store import CooperativeKVStore, MemoryCaps
from fastattention.offload.layer import AttendOptions
from fastattention.offload.pages import PageShape
from offload.fake_device import FakeDevice, Rates

W = 1.0
TOKENS = 512
SHAPE = PageShape(page_size=4, nheads_k=1, headdim=16, headdim_v=16, dtype=torch.float32)
S = TOKENS * SHAPE.token_bytes


class TimedStore:
    """A store with a prompt of TOKENS, and room on the device for all but `on_cpu` layers, an eighth of it buffers."""

    def __init__(
        self, num_layers: int, on_cpu: int, share: float, rates: Rates, device: FakeDevice | None = None
    ) -> None:
        self.device, self.share, self._num_layers = device or FakeDevice(rates), share, num_layers
        layer = TOKENS // SHAPE.page_size + 2
        pages = (num_layers - on_cpu) * layer + on_cpu + layer  # the prompt of a layer passes through
        caps = MemoryCaps(pages * SHAPE.nbytes * 8 // 7, 1 << 24)
        self.store = CooperativeKVStore(num_layers, 1, SHAPE, self.device, caps, lambda layers, tokens: self.share)
        self._new = torch.zeros(1, 1, 1, 16)
        prompt = self._new.expand(1, TOKENS, 1, 16)
        for index in range(num_layers):
            self.store.append(index, prompt, prompt)
        assert sum(self.store.layers_on_cpu) == on_cpu

    @property
    def last_share(self) -> float:
        """The share of the last step."""
        return self.store._staging.share

    def step(self) -> float:
        """Seconds of a step."""
        begin = self.device.now
        for index in range(self._num_layers):
            self.device.compute(W)
            self.attend(index)
        return self.device.now - begin

    def attend(self, index: int) -> None:
        """Runs a layer of a step."""
        self.store.attend(index, self._new, self._new, self._new, AttendOptions())

    def steps(self, count: int) -> float:
        """Seconds of each of the next steps, on average."""
        return sum(self.step() for _ in range(count)) / count


def hybrid_share(num_layers: int, on_cpu: int, link: float, cpu: float) -> float:
    """The share that keeps a link of that bandwidth busy during a whole step, at most 1."""
    t0 = num_layers * W
    seconds = t0 + max(0.0, (on_cpu * S - link * t0) / (cpu + link))
    return min(1.0, link * seconds / (on_cpu * S))
