"""Plans which layers keep their KV cache in host memory, the policy of a decode step, and its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fastattention.errors import ArgumentError
from fastattention.offload.eviction_order import eviction_order
from fastattention.offload.hardware import Hardware
from fastattention.offload.memory import (
    Budget,
    MemoryUse,
    OffloadWorkload,
    divide,
    longest_seqlen,
    memory_of,
    prompt_workspace,
    why_not,
)
from fastattention.offload.model_shape import ModelShape
from fastattention.offload.policy import AUTO, Policy, read_policy
from fastattention.offload.prediction import seconds_per_token, seconds_per_token_in_halves, upload_fraction


@dataclass(frozen=True)
class StepPrediction:
    """The prediction for a policy: `seconds` per token, or the `reason` why it cannot be used."""

    policy: Policy
    num_layers_cpu: int
    seconds: float | None
    reason: str | None
    longest_seqlen: int | None  # the longest sequence whose caches fit; 0: not even one token fits; None: no limit


@dataclass(frozen=True)
class Placement:
    """Which layers keep their cache in host memory. Times are predicted.

    `memory` is per GPU; its `cpu_kv` is that GPU's share of host memory.
    """

    model: ModelShape
    hardware: Hardware
    batch_size: int
    seqlen: int
    quantized: bool  # whether host memory is quantized
    policy: Policy
    on_cpu: tuple[bool, ...]  # for every layer, whether it is on the CPU
    upload_fraction: float  # share of the bytes of layers on the CPU that every step uploads
    memory: MemoryUse
    seconds: float  # of a step: one token for every sequence
    seconds_in_halves: float  # of a step that runs two halves of the batch at once
    predictions: Mapping[Policy, StepPrediction]

    @property
    def num_layers_cpu(self) -> int:
        """L_CPU of the paper."""
        return sum(self.on_cpu)

    @property
    def num_layers_gpu(self) -> int:
        """L_GPU of the paper, layers with a window included."""
        return len(self.on_cpu) - self.num_layers_cpu


def place(
    model: ModelShape,
    hardware: Hardware,
    *,
    batch_size: int,
    seqlen: int,
    gpu_memory: int,
    cpu_memory: int | None = None,
    policy: str = AUTO,
    num_layers_cpu: int | None = None,
    workspace: int | None = None,
    quantized: bool = False,
) -> Placement:
    """The placement of `batch_size` sequences of `seqlen` tokens, prompt and answer together.

    - `model`, `hardware`: dimensions and bandwidths, your own or a preset
    - `gpu_memory`: bytes of the GPU that may be used
    - `cpu_memory`: bytes of host memory for keys and values; None means unlimited
    - `policy`: "auto" (the fastest that fits; on a tie, the simpler), or the name of a Policy. When every layer fits on
        the GPU, the policy is always resident.
    - `num_layers_cpu`: layers on the CPU, among those that keep every token; None means the fewest with which the rest
      fits the GPU
    - `workspace`: bytes that the GPU needs besides weights, keys and values; None means those of a chunk of a prompt
    - `quantized`: host memory holds int8 or float8 with a scale per token and head; layers on the GPU keep the model's
        dtype

    With tensor parallelism, place for one GPU: model.sharded(tp), hardware.shared(tp), and its share of cpu_memory.
    Raises ArgumentError when nothing fits, with what to change.
    """
    wanted = read_policy(policy)
    workload = OffloadWorkload(model, batch_size, seqlen, quantized)
    beside = prompt_workspace(model) if workspace is None else workspace
    budget = Budget(gpu_memory, cpu_memory, beside, num_layers_cpu)
    _check(workload, budget, wanted)
    predictions = {one: _predict(one, workload, hardware, budget) for one in Policy}
    chosen, on_cpu = _choose(wanted, predictions, model.selected_keys > 0)
    memory = memory_of(workload, on_cpu, budget)
    return Placement(
        model=model,
        hardware=hardware,
        batch_size=batch_size,
        seqlen=seqlen,
        quantized=quantized,
        policy=chosen,
        on_cpu=spread(model, on_cpu),
        upload_fraction=upload_fraction(chosen, workload, hardware, on_cpu, memory.staging),
        memory=memory,
        seconds=seconds_per_token(chosen, workload, hardware, on_cpu, memory.staging),
        seconds_in_halves=seconds_per_token_in_halves(chosen, workload, hardware, on_cpu, memory.staging),
        predictions=predictions,
    )


def spread(model: ModelShape, num_layers_cpu: int) -> tuple[bool, ...]:
    """Whether each layer is on the CPU: the first in the order of eviction are, never one with a window."""
    full_layers = model.full_layers
    on_cpu = {full_layers[index] for index in eviction_order(len(full_layers))[:num_layers_cpu]}
    return tuple(layer in on_cpu for layer in range(model.num_layers))


def _predict(policy: Policy, workload: OffloadWorkload, hardware: Hardware, budget: Budget) -> StepPrediction:
    num_layers_cpu = divide(workload, policy, budget)
    longest = longest_seqlen(workload, policy, budget)
    reason = why_not(workload, policy, budget)
    if reason is None and policy is not Policy.RESIDENT and num_layers_cpu == 0:
        reason = "not needed: every layer fits on the GPU"
    staging = memory_of(workload, num_layers_cpu, budget).staging
    seconds = None if reason else seconds_per_token(policy, workload, hardware, num_layers_cpu, staging)
    return StepPrediction(policy, num_layers_cpu, seconds, reason, longest)


def _choose(wanted: Policy | None, predictions: Mapping[Policy, StepPrediction], selects: bool) -> tuple[Policy, int]:
    """The policy and the number of layers on the CPU. Raises ArgumentError with the reason if there is none."""
    if predictions[Policy.RESIDENT].seconds is not None:
        return Policy.RESIDENT, 0
    asked = [wanted] if wanted else list(Policy)
    times = {one: seconds for one in asked if (seconds := predictions[one].seconds) is not None}
    if times:
        fastest = min(times, key=times.__getitem__)  # on a tie the first, which is the simplest
        return fastest, predictions[fastest].num_layers_cpu
    # All policies need the same memory once layers are on the CPU, so any of these reasons tells what would help.
    refused = predictions[wanted or (Policy.GATHERED if selects else Policy.COOPERATIVE)]
    raise ArgumentError(f"{refused.reason}; {_remedy(refused.longest_seqlen)}")


def _remedy(longest: int | None) -> str:
    if longest:
        return f"the longest seqlen that fits is {longest}"
    return "no seqlen fits: give more memory, or divide the model among GPUs by tensor parallelism"


def _check(workload: OffloadWorkload, budget: Budget, wanted: Policy | None) -> None:
    for name, value in {"batch_size": workload.batch_size, "seqlen": workload.seqlen}.items():
        if value < 1:
            raise ArgumentError(f"{name}={value} is not positive")
    amounts = {"gpu_memory": budget.gpu_memory, "workspace": budget.workspace, "cpu_memory": budget.cpu_memory or 0}
    for name, value in amounts.items():
        if value < 0:
            raise ArgumentError(f"{name}={value} is negative")
    model, chosen = workload.model, budget.num_layers_cpu
    most = len(model.full_layers)
    if chosen is not None and not 0 <= chosen <= most:
        window = ", the layers without a window" if model.window_layers else ""
        raise ArgumentError(f"num_layers_cpu={chosen} of {model.name} is not from 0 to {most}{window}")
    if chosen and wanted is Policy.RESIDENT:
        raise ArgumentError(f"num_layers_cpu={chosen} and policy='resident' contradict each other; give one of them")
