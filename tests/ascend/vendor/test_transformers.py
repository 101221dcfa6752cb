"""Models of Transformers on the device npu agree with eager attention on a CPU, by the expected implementations.

The device is that of host_npu.py. The ascend backend is the registered one, except that executor.py runs our kernels on
the CPU.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiers import sampled, slow
from torch import Tensor

from ascend.llvm import TOOLS, find_tool
from ascend.vendor import host_npu
from ascend.vendor.environment import skip_without_torch_npu

skip_without_torch_npu()
pytest.importorskip("transformers", reason="transformers is not installed; `make test-ascend` installs it")
if importlib.util.find_spec("triton") is None or any(find_tool(tool) is None for tool in TOOLS):
    pytest.skip("needs triton-ascend and LLVM 19: run `make test-ascend`", allow_module_level=True)

from integrations.budgets import LARGE, SLOW  # noqa: E402
from integrations.models import assert_same, deep, make_cache, padding_mask, pair, prompts  # noqa: E402
from offload.fake_device import FakeDevice  # noqa: E402

from ascend.executor import execute  # noqa: E402
from fastattention.attention.problem import AttentionOutput, Inputs, Problem  # noqa: E402
from fastattention.backends.ascend.backend import AscendBackend  # noqa: E402
from fastattention.backends.ascend.call import Launch  # noqa: E402
from fastattention.backends.sdpa.backend import SdpaBackend  # noqa: E402
from fastattention.engine.operator import forget_plans  # noqa: E402
from fastattention.errors import ArgumentError  # noqa: E402
from fastattention.integrations.transformers import FastAttentionCache  # noqa: E402
from fastattention.integrations.transformers.versions import CACHE_ARGUMENT  # noqa: E402

# torch_npu's own, when a model is copied to the device.
pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")

host_npu.install()
MODELS = ("llama", "gemma2")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
STEPS = (11, 3, 1, 1)  # tokens: a prompt, a chunk, and two that are decoded


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How many calls "vendor", "triton" and "sdpa" have served."""
    counts: Counter[str] = Counter()

    def by_ascend(self: AscendBackend, problem: Problem, inputs: Inputs) -> AttentionOutput:
        counts[self.implementation(problem, inputs)] += 1
        return ascend_forward(self, problem, inputs)

    def by_sdpa(self: SdpaBackend, problem: Problem, inputs: Inputs) -> AttentionOutput:
        counts["sdpa"] += 1
        return sdpa_forward(self, problem, inputs)

    def launch(_: AscendBackend, launch: Launch) -> None:
        tensors = [value for value in launch.arguments.values() if isinstance(value, Tensor)]
        assert {tensor.device.type for tensor in tensors} == {"npu"}
        execute(launch)

    ascend_forward, sdpa_forward = AscendBackend.forward, SdpaBackend._forward
    monkeypatch.setattr(AscendBackend, "forward", by_ascend)
    monkeypatch.setattr(SdpaBackend, "_forward", by_sdpa)
    monkeypatch.setattr(AscendBackend, "_launch", launch)
    forget_plans()
    yield counts
    forget_plans()


@functools.cache
def on_npu(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model with fast_attention, on the device. Shared by all tests: do not change it."""
    return copy.deepcopy(pair(name).fast).to("npu", dtype)


def steps(model: Any, side: str, cache: str, served: Counter[str] | None = None) -> tuple[Tensor, list[set[str]]]:
    """Logits of all STEPS on one cache, and the implementation that served each of them."""
    ids, seen, past = prompts().to(model.device), padding_mask(side).to(model.device), make_cache(cache, model)
    logits, servers = [], []
    for index, count in enumerate(STEPS):
        if index:
            seen = torch.cat([seen, seen.new_ones(len(seen), count)], dim=1)
        if served is not None:
            served.clear()
        with torch.no_grad():
            logits.append(model(ids[:, :count], attention_mask=seen, **{CACHE_ARGUMENT: past}).logits)
        servers.append(set(served or ()))
    return torch.cat(logits, dim=1), servers


def who_serves(name: str, side: str, cache: str, dtype: torch.dtype) -> list[set[str]]:
    """The implementations that must serve each of STEPS."""
    ours, vendor = {"triton"}, {"vendor"}
    if name == "gemma2":  # the operators have no softcap, and our kernels no mask tensors, which this window needs
        return [ours, {"triton", "sdpa"} if side == "right" else ours, ours, ours]
    if side == "left":  # keys are read in place, after the padding
        return [vendor, ours, ours, ours]
    # The operator that reads a cache has no float32.
    decoding = ours if (cache, dtype) == ("static", torch.float32) else vendor
    return [vendor, vendor, decoding, decoding]


@sampled
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_eager(name: str, dtype: torch.dtype, side: str, cache: str, served: Counter[str]) -> None:
    host_npu.float64.clear()
    fast, servers = steps(on_npu(name, dtype), side, cache, served)
    assert fast.device.type == "npu"
    assert servers == who_serves(name, side, cache, dtype)
    assert not host_npu.float64
    exact, _ = steps(pair(name).eager, side, cache)
    real = torch.nn.functional.pad(padding_mask(side), (0, sum(STEPS[1:])), value=1)
    if dtype is torch.float32:
        assert_same(fast.cpu(), exact, real)
        return
    eager, _ = steps(copy.deepcopy(pair(name).eager).to(dtype), side, cache)
    error, allowed = ((each.cpu().float() - exact)[real.bool()].abs().mean().item() for each in (fast, eager))
    assert 0 < error <= 2 * allowed


@sampled
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_generation_is_that_of_eager(name: str, cache: str | None, side: str) -> None:
    given = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache}
    ids, mask = prompts(), padding_mask(side)
    eager = pair(name).eager.generate(ids, attention_mask=mask, **given)
    fast = on_npu(name).generate(ids.to("npu"), attention_mask=mask.to("npu"), **given)
    assert fast.device.type == "npu"
    assert fast.tolist() == eager.tolist()


@sampled
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_waits_for_the_device_do_not_grow_with_layers(side: str, cache: str) -> None:
    waits = []
    for num_layers in (1, 2):
        model = copy.deepcopy(deep("llama", num_layers)).to("npu", torch.float16)
        host_npu.waits.clear()
        steps(model, side, cache)
        waits.append(dict(host_npu.waits))
    assert waits[0] == waits[1]


@pytest.mark.parametrize("name", MODELS)
def test_decoding_without_a_mask_never_waits(name: str) -> None:
    model, past = on_npu(name, torch.float16), make_cache("dynamic", on_npu(name))
    ids = prompts().to("npu")
    with torch.no_grad():
        model(ids, **{CACHE_ARGUMENT: past})
        host_npu.waits.clear()
        model(ids[:, :1], **{CACHE_ARGUMENT: past})
    assert not host_npu.waits


@slow
@pytest.mark.parametrize("name", MODELS)
def test_autocast_runs_in_its_dtype(name: str) -> None:
    ids, mask = prompts(), padding_mask("left")
    with torch.no_grad():
        exact = pair(name).eager(ids, attention_mask=mask).logits
        with torch.autocast("cpu", torch.float16):
            eager = pair(name).eager(ids, attention_mask=mask).logits
        with torch.autocast("npu", torch.float16):
            fast = on_npu(name)(ids.to("npu"), attention_mask=mask.to("npu")).logits
    assert fast.dtype is eager.dtype is torch.float16
    error, allowed = ((each.cpu().float() - exact)[mask.bool()].abs().mean().item() for each in (fast, eager))
    assert 0 < error <= 2 * allowed


@pytest.mark.parametrize("name", MODELS)
def test_a_mask_of_four_dimensions_goes_to_sdpa(name: str, served: Counter[str]) -> None:
    seen = torch.rand(3, 1, 11, 11, generator=torch.Generator().manual_seed(1)) < 0.4
    seen |= torch.eye(11, dtype=torch.bool)
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        eager = pair(name).eager(prompts(), attention_mask=added).logits
        fast = on_npu(name)(prompts().to("npu"), attention_mask=seen.to("npu")).logits
    assert_same(fast.cpu(), eager)
    assert served == {"sdpa": 2}


@pytest.mark.parametrize(("name", "backward"), [("llama", "vendor"), ("gemma2", "sdpa")])
def test_gradients_are_those_of_eager(name: str, backward: str, served: Counter[str]) -> None:
    ids, mask = prompts(), padding_mask("right")
    labels = ids.masked_fill(mask == 0, -100)
    eager, fast = copy.deepcopy(pair(name).eager), copy.deepcopy(on_npu(name))
    eager(ids, attention_mask=mask, labels=labels).loss.backward()
    fast(ids.to("npu"), attention_mask=mask.to("npu"), labels=labels.to("npu")).loss.backward()
    assert set(served) == {backward}
    for expected, weight in zip(eager.parameters(), fast.parameters(), strict=True):
        assert_same(weight.grad.cpu().view(1, 1, -1), expected.grad.view(1, 1, -1), tolerance=2e-4)


def test_fast_attention_cache_is_refused_without_a_device() -> None:
    """There is no `Device` for an NPU: the default is CUDA's."""
    llama = on_npu("llama")
    cache = FastAttentionCache(llama.config, kv_budget=LARGE)
    with pytest.raises(ArgumentError, match=r"device=npu:0: .* beside a CUDA device only"):
        llama(prompts().to("npu"), **{CACHE_ARGUMENT: cache})


@pytest.mark.parametrize("name", MODELS)
def test_pages_of_fast_attention_cache_are_served(name: str, served: Counter[str]) -> None:
    """The cache has a device of its own, and a budget in which everything fits."""
    device = FakeDevice(torch_device=torch.device("npu", 0))
    arguments = {"kv_budget": LARGE, "cpu_memory": LARGE, "hardware": SLOW, "page_size": 4, "device": device}
    cache = FastAttentionCache(on_npu(name).config, **arguments)
    given = {"max_new_tokens": 8, "do_sample": False}
    ids, mask = prompts(), padding_mask("left")
    eager = pair(name).eager.generate(ids, attention_mask=mask, **given)
    fast = on_npu(name).generate(ids.to("npu"), attention_mask=mask.to("npu"), **{CACHE_ARGUMENT: cache}, **given)
    assert fast.tolist() == eager.tolist()
    assert served["triton"] >= 2 * 7
    assert "sdpa" not in served
