"""The planner: golden figures of the model, memory limits, and properties of any model and machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fastattention.errors import ArgumentError
from fastattention.offload.hardware import PRESETS as MACHINES
from fastattention.offload.hardware import Hardware
from fastattention.offload.memory import OffloadWorkload
from fastattention.offload.model_shape import PRESETS, ModelShape
from fastattention.offload.placement import Placement, place, spread
from fastattention.offload.policy import Policy

GIB = 2**30
K = 1024
LLAMA_7B, LLAMA_8B = PRESETS["llama-2-7b"], PRESETS["llama-3-8b"]
OFFLOADING = (Policy.CLASSICAL, Policy.COOPERATIVE, Policy.HYBRID)


def plan(model: ModelShape = LLAMA_7B, hardware: str = "v100", **options: Any) -> Placement:
    defaults: dict[str, Any] = {"batch_size": 1, "seqlen": 64 * K, "gpu_memory": 32 * GIB}
    return place(model, MACHINES[hardware], **defaults | options)


@pytest.mark.parametrize(
    ("hardware", "model", "seqlen", "num_layers_cpu", "milliseconds"),
    [
        ("h200", LLAMA_8B, 128 * K, 8, (83, 36, 27)),
        ("v100", LLAMA_7B, 64 * K, 8, (781, 136, 122)),
        ("desktop", LLAMA_8B, 128 * K, 16, (344, 171, 140)),
    ],
    ids=["h200", "v100", "desktop"],
)
def test_predictions_are_those_of_the_golden_cases(
    hardware: str, model: ModelShape, seqlen: int, num_layers_cpu: int, milliseconds: tuple[float, ...]
) -> None:
    placement = plan(model, hardware, seqlen=seqlen, num_layers_cpu=num_layers_cpu, gpu_memory=80 * GIB)
    seconds = [placement.predictions[policy].seconds for policy in OFFLOADING]
    assert seconds == pytest.approx([one / 1e3 for one in milliseconds], rel=0.03)
    assert placement.policy is Policy.HYBRID
    assert placement.seconds == seconds[-1]
    assert placement.num_layers_cpu == num_layers_cpu


def test_a_step_is_what_the_formulas_say() -> None:
    hardware = Hardware("round", 1e12, 1e10, 4e10, 4.5e10, handover_seconds=1e-3, layer_overhead_seconds=1e-4)
    options = {"batch_size": 1, "seqlen": 128 * K, "gpu_memory": 64 * GIB, "num_layers_cpu": 4}
    placement = place(LLAMA_8B, hardware, **options)
    layer_kv = 128 * K * 4096
    weights = LLAMA_8B.weight_bytes - LLAMA_8B.logits_weight_bytes - 2 * 4096  # the embedding and a norm are not read
    base = (weights + 28 * layer_kv) / 1e12 + 32 * 1e-4
    expected = {
        Policy.CLASSICAL: 4 * layer_kv / 1e10,
        Policy.COOPERATIVE: base + 4 * (layer_kv / 4e10 + 1e-3),
        # 1e10 and 4e10 together exceed host memory.
        Policy.HYBRID: base + 4e-3 + (4 * layer_kv - 1e10 * base) / 4.5e10,
    }
    for policy, seconds in expected.items():
        assert placement.predictions[policy].seconds == pytest.approx(seconds)
    assert placement.upload_fraction == pytest.approx(1e10 * expected[Policy.HYBRID] / (4 * layer_kv))


def test_uploads_hide_only_as_far_as_buffers_hold_them() -> None:
    # A step of other layers takes more than a second; a layer on the CPU is four times as large as both buffers.
    hardware = Hardware("slow GPU", 1e10, 1e10, 4e10, 4.5e10, handover_seconds=1e-3, layer_overhead_seconds=0)
    options = {"batch_size": 1, "seqlen": 128 * K, "gpu_memory": 64 * GIB, "num_layers_cpu": 4}
    placement = place(LLAMA_8B, hardware, **options)
    layer_kv, staging = 128 * K * 4096, 32 * K * 4096
    base = (LLAMA_8B.weight_bytes - LLAMA_8B.logits_weight_bytes - 2 * 4096 + 28 * layer_kv) / 1e10
    expected = {
        Policy.CLASSICAL: base + 4 * (layer_kv - staging) / 1e10,
        Policy.COOPERATIVE: base + 4 * (layer_kv / 4e10 + 1e-3),
        Policy.HYBRID: base + 4 * ((layer_kv - staging) / 4.5e10 + 1e-3),
    }
    for policy, seconds in expected.items():
        assert placement.predictions[policy].seconds == pytest.approx(seconds)
    uploaded = 4 * staging + 1e10 * (expected[Policy.HYBRID] - base)
    assert placement.upload_fraction == pytest.approx(uploaded / (4 * layer_kv))


def test_classical_wins_where_uploads_hide_under_other_layers() -> None:
    slow_cpu = replace(MACHINES["h200"], cpu_bandwidth=10e9)
    placement = place(LLAMA_8B, slow_cpu, batch_size=1, seqlen=32 * K, gpu_memory=80 * GIB, num_layers_cpu=1)
    assert placement.policy is Policy.CLASSICAL
    assert placement.upload_fraction == 1
    assert placement.seconds < min(placement.predictions[one].seconds or 0 for one in OFFLOADING[1:])


def test_of_equally_fast_policies_the_simplest_is_chosen() -> None:
    # Uploads are hidden completely, and handing over costs nothing.
    hardware = Hardware("fast link", 1e9, 1e12, 1e12, 1e12, handover_seconds=0, layer_overhead_seconds=0)
    placement = place(LLAMA_8B, hardware, batch_size=1, seqlen=K, gpu_memory=64 * GIB, num_layers_cpu=1)
    predicted = placement.predictions
    assert predicted[Policy.CLASSICAL].seconds == predicted[Policy.HYBRID].seconds
    assert placement.policy is Policy.CLASSICAL


@pytest.mark.parametrize("policy", ["auto", *(one.value for one in Policy)])
def test_where_all_fits_nothing_is_offloaded(policy: str) -> None:
    placement = plan(seqlen=16 * K, policy=policy)
    assert placement.policy is Policy.RESIDENT
    assert not any(placement.on_cpu)
    assert placement.memory.cpu_kv == placement.memory.newest_pages == 0
    assert all("every layer fits" in (placement.predictions[one].reason or "") for one in OFFLOADING)


def test_pangu_38b_runs_256k_on_eight_v100() -> None:
    model, hardware = PRESETS["pangu-38b"].sharded(8), MACHINES["v100"].shared(8)
    limits = {"batch_size": 1, "gpu_memory": 32 * GIB, "cpu_memory": 32 * GIB}
    placement = place(model, hardware, seqlen=256 * K, **limits)
    assert placement.num_layers_gpu + placement.num_layers_cpu == 47
    assert placement.memory.cpu_kv == placement.num_layers_cpu * GIB
    assert placement.predictions[Policy.RESIDENT].seconds is None
    resident = placement.predictions[Policy.RESIDENT].longest_seqlen
    assert resident is not None
    assert resident < 128 * K


def test_llama_7b_runs_256k_in_16_gib() -> None:
    placement = plan(seqlen=256 * K, gpu_memory=16 * GIB)
    assert placement.on_cpu == (True,) * 32
    assert placement.memory.cpu_kv == 128 * GIB
    assert placement.predictions[Policy.COOPERATIVE].longest_seqlen is None


@pytest.mark.parametrize("options", [{"policy": one.value} for one in OFFLOADING] + [{"seqlen": K}, {"batch_size": 3}])
def test_every_policy_has_two_buffers_of_one_piece(options: dict[str, Any]) -> None:
    batch_size = options.get("batch_size", 1)
    piece = 16384 // (512 * batch_size) * 512 * batch_size * LLAMA_7B.kv_bytes_per_token()
    assert plan(**options).memory.staging == 2 * piece


def test_buffers_take_at_most_half_of_what_the_cache_may_take_but_a_page_each() -> None:
    weights = LLAMA_7B.weight_bytes + GIB
    page = 512 * LLAMA_7B.kv_bytes_per_token()
    # 72 pages: 36 in buffers, 32 layers' newest, and a prompt of 512 tokens takes two more on its way.
    assert plan(seqlen=K, gpu_memory=weights + 72 * page, num_layers_cpu=32, workspace=GIB).memory.staging == 36 * page
    with pytest.raises(ArgumentError, match=r"staging 16\.00 MiB"):
        plan(gpu_memory=weights)


@pytest.mark.parametrize(
    ("batch_size", "seqlen", "pages"),
    [(1, 64 * K, 5 + 17), (1, 600, 5 + 3), (2, 64 * K, 2 * (5 + 9)), (3, 64 * K, 3 * (5 + 7))],
)
def test_layers_on_the_cpu_leave_their_newest_pages_on_the_gpu(batch_size: int, seqlen: int, pages: int) -> None:
    placement = plan(batch_size=batch_size, seqlen=seqlen, num_layers_cpu=5, gpu_memory=200 * GIB, quantized=True)
    assert placement.memory.newest_pages == pages * 512 * LLAMA_7B.kv_bytes_per_token()


def test_caches_take_whole_pages() -> None:
    memory = plan(seqlen=64 * K + 1, num_layers_cpu=4, gpu_memory=80 * GIB).memory
    assert memory.resident_kv == 28 * (64 * K + 512) * LLAMA_7B.kv_bytes_per_token()
    assert memory.cpu_kv == 4 * 64 * K * LLAMA_7B.kv_bytes_per_token()


def test_a_cache_is_quantized_on_the_cpu_and_in_buffers_only() -> None:
    options = {"seqlen": 128 * K, "num_layers_cpu": 8, "gpu_memory": 80 * GIB}
    full, quantized = plan(**options), plan(**options, quantized=True)
    assert quantized.memory.cpu_kv * 16384 == full.memory.cpu_kv * 8448
    assert quantized.memory.staging * 16384 == full.memory.staging * 8448
    assert quantized.memory.resident_kv == full.memory.resident_kv
    saved = 8 * 128 * K * (16384 - 8448)
    before, after = (one.predictions[Policy.COOPERATIVE].seconds for one in (full, quantized))
    assert before is not None
    assert after == pytest.approx(before - saved / MACHINES["v100"].cpu_bandwidth)


def test_layers_with_a_window_stay_on_the_gpu_and_keep_only_it() -> None:
    windowed = frozenset(range(32)) - {5, 11, 17, 23, 29}
    model = replace(LLAMA_7B, window=4096, window_layers=windowed)
    placement = plan(model, batch_size=2, seqlen=256 * K, gpu_memory=24 * GIB)
    assert 0 < placement.num_layers_cpu <= 5
    assert not any(placement.on_cpu[layer] for layer in windowed)
    assert placement.memory.window_kv == 27 * 2 * 4096 * 16384
    assert placement.num_layers_gpu == 32 - placement.num_layers_cpu
    with pytest.raises(ArgumentError, match="num_layers_cpu=6 of llama-2-7b is not from 0 to 5, the layers without a"):
        plan(model, num_layers_cpu=6)


@pytest.mark.parametrize("count", range(33))
def test_layers_on_the_cpu_are_spread_over_the_depth(count: int) -> None:
    on_cpu = spread(LLAMA_7B, count)
    places = [layer for layer, there in enumerate(on_cpu) if there]
    assert len(on_cpu) == 32
    assert len(places) == count
    # Around the ring too: the uploads of the next token begin in this one.
    gaps = (
        {after - before for before, after in zip(places, [*places[1:], places[0] + 32], strict=True)} if count else {0}
    )
    assert max(gaps) <= 2 * min(gaps) or not count
    assert max(gaps) == min(gaps) or count & (count - 1)  # powers of two: evenly


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 0}, "batch_size=0 is not positive"),
        ({"seqlen": 0}, "seqlen=0 is not positive"),
        ({"gpu_memory": -1}, "gpu_memory=-1 is negative"),
        ({"cpu_memory": -1}, "cpu_memory=-1 is negative"),
        ({"workspace": -1}, "workspace=-1 is negative"),
        (
            {"policy": "guess"},
            "policy='guess' is not known; choose from auto, resident, classical, cooperative, hybrid",
        ),
        ({"num_layers_cpu": 33}, "num_layers_cpu=33 of llama-2-7b is not from 0 to 32$"),
        ({"num_layers_cpu": -1}, "num_layers_cpu=-1 of llama-2-7b is not from 0 to 32$"),
        ({"num_layers_cpu": 1, "policy": "resident"}, "num_layers_cpu=1 and policy='resident' contradict"),
        (
            {"gpu_memory": 8 * GIB},
            r"gpu_memory=8589934592 \(8.00 GiB\) is too small .* it needs .*weights 12.55 GiB, .* tensor parallelism",
        ),
        ({"policy": "resident"}, r"too small for policy 'resident': .*; the longest seqlen that fits is \d+$"),
        ({"num_layers_cpu": 2}, r"2\d+ \(.*30 layers on the GPU 30.00 GiB\); num_layers_cpu=2, use at least 15"),
        (
            {"cpu_memory": 10 * GIB},
            r"cpu_memory=10737418240 \(10.00 GiB\) is too small for 15 layers of seqlen=65536: "
            r"they need 16106127360 \(15.00 GiB\); the longest seqlen that fits is \d+$",
        ),
        ({"gpu_memory": 14 * GIB, "policy": "hybrid"}, "too small for policy 'hybrid': .*newest pages 392.00 MiB"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_change(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        plan(**options)


def test_the_longest_sequence_of_a_message_fits() -> None:
    with pytest.raises(ArgumentError) as refused:
        plan(cpu_memory=10 * GIB)
    longest = int(str(refused.value).split()[-1])
    assert plan(cpu_memory=10 * GIB, seqlen=longest).seqlen == longest


@st.composite
def machines(draw: st.DrawFn) -> Hardware:
    dram = draw(st.floats(1e9, 1e12))
    share = st.floats(0.01, 1)
    return Hardware(
        "any",
        gpu_bandwidth=draw(st.floats(1e10, 1e13)),
        link_bandwidth=dram * draw(share),
        cpu_bandwidth=dram * draw(share),
        dram_bandwidth=dram,
        handover_seconds=draw(st.floats(0, 1e-2)),
        layer_overhead_seconds=draw(st.floats(0, 1e-2)),
    )


@st.composite
def models(draw: st.DrawFn) -> ModelShape:
    num_layers = draw(st.integers(1, 100))
    nheads_k = draw(st.integers(1, 8))
    windowed = draw(st.frozensets(st.integers(0, num_layers - 1)))
    return ModelShape(
        "any",
        num_layers=num_layers,
        nheads=nheads_k * draw(st.integers(1, 8)),
        nheads_k=nheads_k,
        headdim=draw(st.sampled_from([64, 96, 128])),
        hidden_size=draw(st.sampled_from([512, 4096])),
        intermediate_size=8192,
        vocab_size=32000,
        window=draw(st.integers(1, 10000)) if windowed else None,
        window_layers=windowed,
    )


@st.composite
def limits(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "batch_size": draw(st.integers(1, 4)),
        "seqlen": draw(st.integers(1, 1 << 20)),
        "gpu_memory": draw(st.integers(GIB, 100 * GIB)),
        "cpu_memory": draw(st.none() | st.integers(0, 500 * GIB)),
        "quantized": draw(st.booleans()),
    }


def place_or_none(model: ModelShape, hardware: Hardware, **options: Any) -> Placement | None:
    try:
        return place(model, hardware, **options)
    except ArgumentError:
        return None


@settings(deadline=None)
@given(models(), machines(), limits())
def test_caps_are_never_exceeded_and_nothing_is_lost(
    model: ModelShape, hardware: Hardware, options: dict[str, Any]
) -> None:
    placement = place_or_none(model, hardware, **options)
    assume(placement is not None)
    assert placement is not None
    memory = placement.memory
    assert memory.gpu <= options["gpu_memory"]
    assert options["cpu_memory"] is None or memory.cpu_kv <= options["cpu_memory"]
    workload = OffloadWorkload(model, options["batch_size"], options["seqlen"], options["quantized"])
    on_gpu = len(model.full_layers) - placement.num_layers_cpu
    assert memory.resident_kv >= on_gpu * workload.gpu_layer_bytes
    newest = placement.num_layers_cpu * workload.cpu_page_bytes
    assert memory.cpu_kv + newest >= placement.num_layers_cpu * workload.cpu_layer_bytes
    assert memory.newest_pages >= placement.num_layers_cpu * workload.gpu_page_bytes
    assert not any(placement.on_cpu[one] for one in model.window_layers)
    assert 0 <= placement.upload_fraction <= 1
    assert placement.seconds == min(one.seconds for one in placement.predictions.values() if one.seconds is not None)


@settings(deadline=None)
@given(models(), machines(), st.data())
def test_hybrid_is_never_slower_than_both_others(model: ModelShape, hardware: Hardware, data: st.DataObject) -> None:
    assume(model.full_layers)
    num_layers_cpu = data.draw(st.integers(1, len(model.full_layers)))
    options = {"batch_size": 1, "seqlen": data.draw(st.integers(1, 1 << 20)), "gpu_memory": 10000 * GIB}
    predicted = place(model, hardware, num_layers_cpu=num_layers_cpu, **options).predictions
    classical, cooperative, hybrid = (predicted[policy].seconds for policy in OFFLOADING)
    assert classical is not None
    assert cooperative is not None
    assert hybrid is not None
    assert hybrid <= cooperative * (1 + 1e-9)
    # It hands over, unlike classical; apart from that, classical is slower wherever it waits for the link.
    free = replace(hardware, handover_seconds=0.0)
    without = place(model, free, num_layers_cpu=num_layers_cpu, **options).predictions[Policy.HYBRID].seconds
    assert without is not None
    assert without <= classical * (1 + 1e-9)


@settings(deadline=None)
@given(
    models(),
    machines(),
    limits(),
    st.sampled_from(["gpu_bandwidth", "link_bandwidth", "cpu_bandwidth", "dram_bandwidth"]),
    st.floats(1, 10),
)
def test_more_bandwidth_never_makes_a_prediction_slower(
    model: ModelShape, hardware: Hardware, options: dict[str, Any], which: str, factor: float
) -> None:
    slow = place_or_none(model, hardware, **options)
    more = getattr(hardware, which) * factor
    if which in ("link_bandwidth", "cpu_bandwidth"):
        more = min(more, hardware.dram_bandwidth)
    fast = place_or_none(model, replace(hardware, **{which: more}), **options)
    assume(slow is not None)
    assert slow is not None
    assert fast is not None
    assert fast.seconds <= slow.seconds * (1 + 1e-9)
    for policy in Policy:
        before, after = slow.predictions[policy].seconds, fast.predictions[policy].seconds
        assert (before is None) == (after is None)
        assert before is None or after is None or after <= before * (1 + 1e-9)


@settings(deadline=None)
@given(models(), limits(), st.sampled_from(Policy), st.none() | st.integers(0, 100))
def test_the_longest_sequence_fits_and_one_token_more_does_not(
    model: ModelShape, options: dict[str, Any], policy: Policy, num_layers_cpu: int | None
) -> None:
    assume(num_layers_cpu is None or num_layers_cpu <= len(model.full_layers))
    assume(not (num_layers_cpu and policy is Policy.RESIDENT))
    forced = {"policy": policy.value, "num_layers_cpu": num_layers_cpu}
    some = place_or_none(model, MACHINES["v100"], **options | {"seqlen": 1, "num_layers_cpu": num_layers_cpu})
    assume(some is not None)
    assert some is not None
    longest = some.predictions[policy].longest_seqlen
    if longest is None:
        assert place_or_none(model, MACHINES["v100"], **options | forced | {"seqlen": 1 << 40}) is not None
        return
    if longest:
        placement = place(model, MACHINES["v100"], **options | forced | {"seqlen": longest})
        assert placement.memory.gpu <= options["gpu_memory"]
        assert options["cpu_memory"] is None or placement.memory.cpu_kv <= options["cpu_memory"]
    assert place_or_none(model, MACHINES["v100"], **options | forced | {"seqlen": longest + 1}) is None
