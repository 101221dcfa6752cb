"""What a division of layers takes of GPU and host memory, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastattention.offload.model_shape import ModelShape
from fastattention.offload.policy import Policy
from fastattention.sizes import format_bytes

STAGING_TOKENS = 16384  # of a layer, in one piece of an upload
STAGING_BUFFERS = 2  # one is filled while the other is attended to
# Assumed: activations of a prompt taken in pieces, libraries, fragmentation.
DEFAULT_WORKSPACE = 1 << 30
ENDLESS = 1 << 62  # tokens: what fits this has no limit


@dataclass(frozen=True)
class Workload:
    """Sequences of one length, with every key and value of theirs in a cache."""

    model: ModelShape
    batch_size: int
    seqlen: int
    quantised: bool = False  # an int8 or float8 cache

    @property
    def layer_kv_bytes(self) -> int:
        """The cache of a layer that keeps every token: S of the model."""
        return self._bytes_of(self.batch_size * self.seqlen)

    @property
    def window_kv_bytes(self) -> int:
        """The caches of all layers with a window, which are always on the GPU."""
        kept = min(self.seqlen, self.model.window or 0)
        return len(self.model.window_layers) * self._bytes_of(self.batch_size * kept)

    @property
    def staging_bytes(self) -> int:
        """Room on the GPU for uploads. A layer is attended to piece by piece, so that this does not grow with it."""
        return STAGING_BUFFERS * self._bytes_of(min(self.batch_size * self.seqlen, STAGING_TOKENS))

    def _bytes_of(self, tokens: int) -> int:
        return tokens * self.model.kv_bytes_per_token(quantised=self.quantised)


@dataclass(frozen=True)
class Budget:
    """What may be used, in bytes; `num_layers_cpu` if the caller has chosen that."""

    gpu_memory: int
    cpu_memory: int | None = None  # None: as much as it takes
    workspace: int = DEFAULT_WORKSPACE
    num_layers_cpu: int | None = None


@dataclass(frozen=True)
class Memory:
    """Bytes by what they are for. All are on the GPU but `cpu_kv`."""

    weights: int
    workspace: int
    resident_kv: int  # of layers on the GPU that keep every token
    window_kv: int
    staging: int
    cpu_kv: int

    @property
    def gpu(self) -> int:
        """All of the GPU's."""
        return self.weights + self.workspace + self.resident_kv + self.window_kv + self.staging


def memory_of(workload: Workload, policy: Policy, num_layers_cpu: int, budget: Budget) -> Memory:
    """What `num_layers_cpu` layers on the CPU take."""
    model = workload.model
    return Memory(
        weights=model.weight_bytes,
        workspace=budget.workspace,
        resident_kv=(len(model.full_layers) - num_layers_cpu) * workload.layer_kv_bytes,
        window_kv=workload.window_kv_bytes,
        staging=workload.staging_bytes if policy.uploads else 0,
        cpu_kv=num_layers_cpu * workload.layer_kv_bytes,
    )


def divide(workload: Workload, policy: Policy, budget: Budget) -> int:
    """Layers on the CPU: the caller's number, or the least that leave the GPU room. It may be that nothing fits."""
    if policy is Policy.RESIDENT:
        return 0
    if budget.num_layers_cpu is not None:
        return budget.num_layers_cpu
    full_layers = len(workload.model.full_layers)
    room = budget.gpu_memory - memory_of(workload, policy, full_layers, budget).gpu
    return full_layers - min(max(room // workload.layer_kv_bytes, 0), full_layers)


def why_not(workload: Workload, policy: Policy, budget: Budget) -> str | None:
    """Why the policy does not fit the budget, None if it does."""
    if policy is Policy.RESIDENT and budget.num_layers_cpu:
        return f"num_layers_cpu={budget.num_layers_cpu} leaves layers on the CPU"
    memory = memory_of(workload, policy, divide(workload, policy, budget), budget)
    if memory.gpu > budget.gpu_memory:
        return _gpu_too_small(workload, policy, memory, budget)
    if budget.cpu_memory is not None and memory.cpu_kv > budget.cpu_memory:
        return _cpu_too_small(workload, memory.cpu_kv, budget.cpu_memory)
    return None


def longest_seqlen(workload: Workload, policy: Policy, budget: Budget) -> int | None:
    """The longest sequence of which the policy, or the GPU alone, holds all: 0 if there is none, None without limit.

    That of `workload` does not matter. A longer sequence needs no less of anything, so that halving finds it.
    """

    def fits(seqlen: int) -> bool:
        work = replace(workload, seqlen=seqlen)
        return any(why_not(work, one, budget) is None for one in (Policy.RESIDENT, policy))

    if fits(ENDLESS):
        return None
    longest, too_long = 0, ENDLESS
    while too_long - longest > 1:
        middle = (longest + too_long) // 2
        longest, too_long = (middle, too_long) if fits(middle) else (longest, middle)
    return longest


def _gpu_too_small(workload: Workload, policy: Policy, memory: Memory, budget: Budget) -> str:
    parts = {
        "weights": memory.weights,
        "workspace": memory.workspace,
        "layers with a window": memory.window_kv,
        "staging": memory.staging,
        f"{memory.resident_kv // workload.layer_kv_bytes} layers on the GPU": memory.resident_kv,
    }
    needs = ", ".join(f"{part} {format_bytes(size)}" for part, size in parts.items() if size)
    said = (
        f"gpu_memory={budget.gpu_memory} ({format_bytes(budget.gpu_memory)}) is too small for policy {policy.value!r}: "
        f"it needs {memory.gpu} ({needs})"
    )
    free = replace(budget, num_layers_cpu=None)
    if budget.num_layers_cpu is None or why_not(workload, policy, free) is not None:
        return said
    return f"{said}; num_layers_cpu={budget.num_layers_cpu}, use at least {divide(workload, policy, free)}"


def _cpu_too_small(workload: Workload, cpu_kv: int, cpu_memory: int) -> str:
    return (
        f"cpu_memory={cpu_memory} ({format_bytes(cpu_memory)}) is too small for {cpu_kv // workload.layer_kv_bytes} "
        f"layers of seqlen={workload.seqlen}: they need {cpu_kv} ({format_bytes(cpu_kv)})"
    )
