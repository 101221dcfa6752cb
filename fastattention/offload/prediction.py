"""Predicts the time of a decode step from bandwidths. docs/internals/long-contexts.md explains the formulas.

T0 is the time of a step without the layers on the CPU, S the bytes of the cache of one of these, L_CPU their number,
and `staging_bytes` the buffers in which uploads wait for their layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fastattention.offload.hardware import Hardware
from fastattention.offload.memory import OffloadWorkload
from fastattention.offload.policy import Policy

# Seconds of a step, given the number of layers on the CPU and the bytes of buffers.
Predict = Callable[[Policy, OffloadWorkload, Hardware, int, int], float]


def seconds_per_token(
    policy: Policy, workload: OffloadWorkload, hardware: Hardware, num_layers_cpu: int, staging_bytes: int
) -> float:
    """Seconds of a step: one token for every sequence of the batch."""
    base = _base_seconds(workload, hardware, num_layers_cpu)
    cpu_bytes = num_layers_cpu * workload.cpu_layer_bytes
    handovers = num_layers_cpu * hardware.handover_seconds
    hidden = _hidden_seconds(base, hardware, num_layers_cpu, staging_bytes)
    if policy is Policy.CLASSICAL:
        return base + max(0.0, cpu_bytes / hardware.link_bandwidth - hidden)
    if policy is Policy.COOPERATIVE:
        return base + handovers + cpu_bytes / hardware.cpu_bandwidth
    if policy is Policy.GATHERED:
        return base + num_layers_cpu * workload.gathered_bytes / hardware.link_bandwidth
    if policy is Policy.HYBRID:
        # Uploads hide under T0. Then uploads and the CPU share the rest, as fast as host memory lets both read.
        left = max(0.0, cpu_bytes - hardware.link_bandwidth * hidden)
        return base + handovers + left / _shared_bandwidth(hardware)
    return base


def seconds_per_token_in_halves(
    policy: Policy, workload: OffloadWorkload, hardware: Hardware, num_layers_cpu: int, staging_bytes: int
) -> float:
    """Seconds of a step in two halves at once: the GPU computes layers of one while the CPU attends for the other.

    G is T0 of both halves, with all weights read twice. C is the CPU's time for both, one after the other. Between two
    layers on the CPU each half takes G / (2 L_CPU) of the GPU, and then C / (2 L_CPU) of the CPU. At best, a step takes

        max(G, C) + min(G, C) / (2 L_CPU)

    since at the start the CPU has nothing to attend to yet, or at the end the GPU nothing else to compute. Uploads run
    during the whole step. A batch of one sequence is not divided.
    """
    if workload.batch_size < 2:
        return seconds_per_token(policy, workload, hardware, num_layers_cpu, staging_bytes)
    fewer = workload.batch_size // 2
    halves = [replace(workload, batch_size=size) for size in (workload.batch_size - fewer, fewer)]
    gpu = sum(_base_seconds(half, hardware, num_layers_cpu) for half in halves)
    cpu_bytes = num_layers_cpu * workload.cpu_layer_bytes
    if policy is Policy.CLASSICAL:
        hidden = _hidden_seconds(gpu, hardware, num_layers_cpu, staging_bytes)
        return gpu + max(0.0, cpu_bytes / hardware.link_bandwidth - hidden)
    if policy is Policy.GATHERED:
        return gpu + num_layers_cpu * workload.gathered_bytes / hardware.link_bandwidth
    if policy is Policy.RESIDENT or num_layers_cpu == 0:
        return gpu
    rate = hardware.cpu_bandwidth if policy is Policy.COOPERATIVE else _shared_bandwidth(hardware)
    cpu = 2 * num_layers_cpu * hardware.handover_seconds + cpu_bytes / rate
    return max(gpu, cpu) + min(gpu, cpu) / (2 * num_layers_cpu)


def upload_fraction(
    policy: Policy,
    workload: OffloadWorkload,
    hardware: Hardware,
    num_layers_cpu: int,
    staging_bytes: int,
    predict: Predict = seconds_per_token,
) -> float:
    """The share of the caches on the CPU that a step uploads. A hybrid uploads as much as the link carries in a step.

    predict: the time of the step
    """
    cpu_bytes = num_layers_cpu * workload.cpu_layer_bytes
    if policy is Policy.CLASSICAL:
        return 1.0
    if policy is not Policy.HYBRID or cpu_bytes == 0:
        return 0.0
    base = _base_seconds(workload, hardware, num_layers_cpu)
    idle = base - _hidden_seconds(base, hardware, num_layers_cpu, staging_bytes)  # of the link, buffers full
    busy = predict(policy, workload, hardware, num_layers_cpu, staging_bytes) - idle
    return min(1.0, hardware.link_bandwidth * busy / cpu_bytes)


def _shared_bandwidth(hardware: Hardware) -> float:
    """Bandwidth of host memory while uploads and the CPU both read it."""
    return min(hardware.cpu_bandwidth + hardware.link_bandwidth, hardware.dram_bandwidth)


def _base_seconds(workload: OffloadWorkload, hardware: Hardware, num_layers_cpu: int) -> float:
    """T0: the time for weights, for the caches on the GPU, and the overhead of layers."""
    model = workload.model
    layer = min(workload.gpu_layer_bytes, workload.gathered_bytes or workload.gpu_layer_bytes)
    on_gpu = (len(model.full_layers) - num_layers_cpu) * layer + workload.window_kv_bytes + workload.indexer_bytes
    weights = model.num_layers * model.layer_weight_bytes + model.logits_weight_bytes
    return (weights + on_gpu) / hardware.gpu_bandwidth + model.num_layers * hardware.layer_overhead_seconds


def _hidden_seconds(base: float, hardware: Hardware, num_layers_cpu: int, staging_bytes: int) -> float:
    """Seconds of uploads that T0 hides: until the buffers are full, once before every layer on the CPU."""
    return min(base, num_layers_cpu * staging_bytes / hardware.link_bandwidth)
