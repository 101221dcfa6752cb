"""How fast is attention with its projection and all-reduce in row blocks, compared with the three in sequence?

    python benchmarks/tiled_allreduce.py --tp 4

It starts one process for each GPU. The baselines are plain torch: "serial" is attention, product and NCCL's all-reduce.
There are two more (torch_tensor_parallel.py): "two-shot" sums by symmetric memory, "async" fuses product and
reduce-scatter. "default" is attention_out_proj_allreduce as users call it. The others use torch's attention too, so
that only blocks and transports differ: "auto" chooses, and each transport runs alone. All take turns, called one by
one ("eager") and replayed from CUDA graphs ("graph"). Results are compared with those of serial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from harness import RESULTS, show
from pages import tensor_parallel
from ranks import run_ranks
from tiled_allreduce_trace import trace
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch_tensor_parallel import Project, async_tensor_parallel, two_shot

from fastattention import environment
from fastattention.cli.bench.record import write_record
from fastattention.cli.bench.timing import in_turns, time_on_device
from fastattention.cli.console import MESSAGES
from fastattention.cli.machine import describe_machine
from fastattention.distributed import attention_out_proj_allreduce
from fastattention.distributed.agreement import Agreed, agreement_of
from fastattention.distributed.row_blocks import Strategy
from fastattention.distributed.row_partitions import worth_dividing
from fastattention.distributed.transports import TRANSPORTS
from fastattention.errors import UnsupportedError

SERIAL, COMPUTE, ALL_REDUCE = "serial", "compute", "all-reduce"
OTHERS: dict[str, Callable[[Tensor, Tensor], Project]] = {"two-shot": two_shot, "async": async_tensor_parallel}
OURS = {"default": ("auto", "auto"), **{name: (name, "sdpa") for name in ("auto", *TRANSPORTS)}}  # transport, backend
CALLS, SHORT_CALLS = (
    4,
    32,
)  # calls in a row, timed together; SHORT_CALLS of calls that are not worth dividing
WARM_UP = 2
LARGEST_DIFFERENCE = (
    0.02  # difference from serial, relative to the largest element; a row of a wrong rank or block would differ by 1
)
TIME_LIMIT = 560.0  # seconds for everything

Work = Callable[[], object]


@dataclass(frozen=True)
class Model:
    """One attention layer, over all ranks."""

    hidden: int
    nheads: int
    nheads_k: int
    headdim: int = 128


MODELS = {"7B": Model(4096, 32, 32), "70B": Model(8192, 64, 8)}


@dataclass(frozen=True)
class Case:
    """A causal call."""

    model: str
    batch_size: int
    seqlen_q: int
    seqlen_k: int


CASES = (
    *(Case("70B", *sizes) for sizes in ((8, 2048, 2048), (4, 4096, 4096), (1, 8192, 8192), (1, 32768, 32768))),
    *(Case("7B", *sizes) for sizes in ((1, 8192, 8192), (8, 2048, 2048))),
    *(Case("70B", *sizes) for sizes in ((8, 1, 4096), (1, 128, 4096))),  # too little to divide
)


@dataclass(frozen=True)
class Options:
    """The options of every rank."""

    cases: tuple[Case, ...]
    rounds: int
    graphs: bool
    trace: bool
    output: Path
    dtype: torch.dtype = torch.bfloat16
    heads_of: int = 0  # a rank has the heads of one of this many ranks; 0: of the actual number


class Share:
    """A rank's heads of a case, and the functions that are timed. All write to `out`."""

    def __init__(self, case: Case, device: torch.device, options: Options) -> None:
        model, size, dtype = MODELS[case.model], options.heads_of or dist.get_world_size(), options.dtype
        nheads, nheads_k = model.nheads // size, max(model.nheads_k // size, 1)
        generator = torch.Generator(device).manual_seed(dist.get_rank())

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        self.q = random(case.batch_size, case.seqlen_q, nheads, model.headdim)
        self.k, self.v = (random(case.batch_size, case.seqlen_k, nheads_k, model.headdim) for _ in range(2))
        self.w_o = random(model.hidden, nheads * model.headdim) * (model.nheads * model.headdim) ** -0.5
        self.out = torch.empty(case.batch_size, case.seqlen_q, model.hidden, device=device, dtype=dtype)
        self._is_square = case.seqlen_q == case.seqlen_k
        self._mask = None
        if not self._is_square and case.seqlen_q > 1:  # a single query sees every key
            self._mask = causal_lower_right(case.seqlen_q, case.seqlen_k)
        self._attended = self.attention()
        self._summed = torch.zeros_like(self.out)

    def parts(self) -> dict[str, Work]:
        """The parts of serial, each alone."""
        return {
            "attention": self.attention,
            "product": lambda: self._product(self._attended),
            COMPUTE: lambda: self._product(self.attention()),
            ALL_REDUCE: lambda: dist.all_reduce(self._summed),
        }

    def attention(self) -> Tensor:
        """All rows, by torch: (rows, nheads * headdim)."""
        q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(
            q, k, v, self._mask, is_causal=self._is_square, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).reshape(-1, self.w_o.shape[1])

    def serial(self) -> None:
        """Runs the three in sequence, by torch."""
        self._product(self.attention())
        dist.all_reduce(self.out)

    def projected_by(self, project: Project) -> None:
        """Runs another of torch's implementations."""
        project(self.attention())

    def ours(self, transport: str, backend: str) -> None:
        """Runs ours, by the strategy that is agreed on."""
        attention_out_proj_allreduce(
            self.q, self.k, self.v, self.w_o, causal=True, backend=backend, transport=transport, out=self.out
        )

    def _product(self, attended: Tensor) -> None:
        torch.mm(attended, self.w_o.t(), out=self.out.view(-1, self.w_o.shape[0]))


def _as_record(one: Strategy) -> dict[str, Any]:
    rows, attention_rows = one.partition
    return {"rows": rows, "attended": attention_rows, "transport": one.transport.name}


def agreed_on(share: Share, transport: str, backend: str) -> Agreed:
    """The agreement of the ranks for the call that `share.ours` has made."""
    group = dist.group.WORLD
    assert group is not None
    shapes = (share.q.shape, share.k.shape[1:], share.w_o.shape[0])
    for key, agreed in agreement_of(group).agreed.items():
        one = key.problem
        q_shape = (one.batch_size, one.seqlen_q, one.nheads, one.headdim)
        k_shape = (one.seqlen_k, one.nheads_k, one.headdim)
        if (key.transport, key.backend) == (transport, backend) and (q_shape, k_shape, key.hidden) == shapes:
            return agreed
    raise AssertionError(f"nothing has been agreed on for {transport} and {backend}")


class Contest:
    """All implementations of a case, in both kinds. Makes the calls that ranks have to agree on."""

    def __init__(self, share: Share, graphs: bool) -> None:
        self.share = share
        self.refused: dict[str, str] = {}
        self.agreed: dict[str, Agreed] = {}
        share.serial()
        self._expected = share.out.clone()
        eager: dict[str, Work] = {SERIAL: share.serial}
        for name, make in OTHERS.items():
            try:
                eager[name] = partial(share.projected_by, make(share.w_o, share.out))
            except (RuntimeError, AttributeError) as error:
                self.refused[name] = str(error).partition("\n")[0]
        for name, (transport, backend) in OURS.items():
            try:
                share.ours(transport, backend)
            except UnsupportedError as error:
                self.refused[name] = str(error)
                continue
            self.agreed[name] = agreed_on(share, transport, backend)
            eager[name] = partial(share.ours, transport, backend)
        self.kinds = {"eager": {**eager, **share.parts()}}
        if graphs:
            self.kinds["graph"] = dict(self._graphs())

    def _graphs(self) -> Iterator[tuple[str, Work]]:
        for name, work in self.kinds["eager"].items():
            try:
                yield name, graphed(work)
            except RuntimeError as error:
                self.refused[f"{name}, graph"] = str(error)

    def differences(self) -> dict[str, dict[str, float]]:
        """By kind and name: the largest difference from serial, relative to its largest element.

        Raises AssertionError where that is too much, or the ranks have different bits.
        """
        return {
            kind: {name: self._difference(name, works[name]) for name in self.agreed if name in works}
            for kind, works in self.kinds.items()
        }

    def _difference(self, name: str, work: Work) -> float:
        out = self.share.out.fill_(torch.nan)
        work()
        bits = out.view(torch.int32)
        largest = bits.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        assert torch.equal(bits, largest), f"{name}: ranks have different results"
        difference = ((out - self._expected).abs().max() / self._expected.abs().max()).item()
        assert difference <= LARGEST_DIFFERENCE, f"{name} is off by {difference:.2g} of the largest number"
        return difference


def graphed(work: Work) -> Work:
    """A replay of `work`."""
    for _ in range(WARM_UP):
        work()
    meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own threads may call CUDA meanwhile
        work()
    meet()
    return graph.replay


def meet() -> None:
    """Waits until the work of all ranks is done, on the device too."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def calls_of(out: Tensor) -> int:
    """The number of calls with result `out` that are timed in a row, the same on all ranks."""
    return CALLS if worth_dividing(out.shape[:2].numel(), out.nbytes) else SHORT_CALLS


def medians(contest: Contest, rounds: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Seconds by kind and name: the median of the rounds, on the slowest rank."""
    calls = calls_of(contest.share.out)

    def turn(work: Work) -> float:
        meet()
        return time_on_device(work, calls, device.type)

    works = {(kind, name): partial(turn, work) for kind, named in contest.kinds.items() for name, work in named.items()}
    times = in_turns(works, rounds, WARM_UP)
    slowest = torch.tensor([median(found) for found in times.values()], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    seconds_by_kind: dict[str, dict[str, float]] = {kind: {} for kind in contest.kinds}
    for (kind, name), seconds in zip(works, slowest.tolist(), strict=True):
        seconds_by_kind[kind][name] = seconds
    return seconds_by_kind


def derived(contest: Contest, seconds: dict[str, float]) -> dict[str, Any]:
    """Derived figures of one kind: the bound of any division, and the share of its gain that each of ours reaches."""
    serial, compute, transfer = (seconds[name] for name in (SERIAL, COMPUTE, ALL_REDUCE))
    ours = {name: seconds[name] for name in contest.agreed if name in seconds}
    return {
        "bound": max(compute, transfer),
        "speedup": {name: serial / seconds[name] for name in (*OTHERS, *ours) if name in seconds},
        "hidden": {name: 1 - (taken - compute) / transfer for name, taken in ours.items()},
    }


def answer(case: Case, options: Options, device: torch.device) -> dict[str, Any]:
    """The figures of a case."""
    contest = Contest(Share(case, device, options), options.graphs)
    differences = contest.differences()
    seconds = medians(contest, options.rounds, device)
    return {
        **asdict(case),
        "seconds": seconds,
        "derived": {kind: derived(contest, each) for kind, each in seconds.items()},
        "plans": {
            name: {"eager": _as_record(agreed.eager), "graph": _as_record(agreed.graph)}
            for name, agreed in contest.agreed.items()
        },
        "refused": contest.refused,
        "difference": differences,
    }


def traced(case: Case, options: Options, device: torch.device) -> dict[str, Any]:
    """By kind and name: one traced call on this rank. Inflation is relative to serial, which computes rows alone."""
    contest = Contest(Share(case, device, options), options.graphs)
    found: dict[str, Any] = {}
    for kind, works in contest.kinds.items():
        overlaps = {name: trace(works[name]) for name in (SERIAL, *contest.agreed) if name in works}
        alone = overlaps[SERIAL].compute
        found[kind] = {
            name: {**one._asdict(), "hidden": one.hidden, "inflation": one.inflation(alone)}
            for name, one in overlaps.items()
        }
    return found


def kernels_of_torch() -> AbstractContextManager[None]:
    """Lets all implementations use cuDNN's attention wherever it can."""
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    chosen: AbstractContextManager[None] = sdpa_kernel(kernels, set_priority=True)
    return chosen


def measure(device: torch.device, options: Options) -> None:
    """Measures all cases on every rank; rank 0 prints and writes after each. Traces come last: they slow calls."""
    record = {
        "question": "tiled_allreduce",
        "machine": describe_machine(),
        "world_size": dist.get_world_size(),
        "nccl": torch.cuda.nccl.version() if device.type == "cuda" else None,  # type: ignore[no-untyped-call]
        "nccl_p2p_disable": environment.peer_to_peer_disabled(),
        "heads_of": options.heads_of or dist.get_world_size(),
        "rounds": options.rounds,
    }
    rows: list[dict[str, Any]] = []
    record["rows"] = rows
    with torch.no_grad(), kernels_of_torch():
        for case in options.cases:
            rows.append(answer(case, options, device))
            save(record, options.output)
        for row, case in zip(rows, options.cases, strict=True) if options.trace else ():
            row["trace"] = traced(case, options, device)
            save(record, options.output)
    if dist.get_rank() == 0:
        show(*tensor_parallel.sections(f"{dist.get_world_size()} ranks", rows))


def save(record: dict[str, Any], output: Path) -> None:
    """Rank 0 writes tiled_allreduce_tp4.json, by the number of ranks; unusual options are added to the name."""
    if dist.get_rank() == 0:
        name = f"tiled_allreduce_tp{record['world_size']}" + "_no_p2p" * record["nccl_p2p_disable"]
        if record["heads_of"] != record["world_size"]:
            name += f"_heads_of_{record['heads_of']}"
        write_record(output / f"{name}.json", record)
        row = record["rows"][-1]
        MESSAGES.print(row["model"], row["batch_size"], row["seqlen_q"], row["derived"], row["refused"])


def main(
    tp: int = 4,
    rounds: int = 9,
    graphs: bool = True,
    trace: bool = False,
    model: str = "70B",
    lengths: str = "",
    heads_of: int = 0,
    output: Path = RESULTS,
) -> None:
    """Measure the GPUs of this host; write tiled_allreduce_tp4.json, by the number of ranks, into `output`.

    --lengths 32768,65536: instead of all cases, these, one sequence of --model each.
    --heads-of 4: each rank has a quarter of the heads, whatever their number. So two ranks have the compute of four
    ranks, and sums of which a rank moves two thirds.
    """
    long = tuple(Case(model, 1, int(length), int(length)) for length in lengths.split(",") if length)
    options = Options(long or CASES, rounds, graphs, trace, output, heads_of=heads_of)
    run_ranks(measure, [options], tp, "cuda", TIME_LIMIT)


if __name__ == "__main__":
    typer.run(main)
