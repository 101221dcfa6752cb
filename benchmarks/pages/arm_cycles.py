"""The page of predictions for 64-bit Arm, by machine code and llvm-mca's models of processors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .markdown import number, page, percent, table
from .results import Result

INTRODUCTION = """\
**No Arm processor has run these kernels for time.** Every figure on this page is a prediction. Calls are compiled with
the build's flags and run once under emulation, which records the instructions that they execute. llvm-mca {version}
counts their cycles by its models of {processors}.
The models let every load hit the L1 cache, predict every branch, and have iterations follow each other without a gap.
They know no memory beyond the L1 cache and no power limit. So a figure is the most that a core can reach, if its model
is right. **Bold** figures miss what they are to reach."""
PRODUCTS = """\
A panel of keys, or as many columns of values, and 48 rows, at heads of 128. The peak is what the multiply-adds of the
main loop would take alone. Cells have two shares of it: of one iteration of the main loop, and of everything that the
call executed. The call includes rearrangements, and loads and stores of sums. The third figure counts accesses of the
stack in an iteration, and is left out where there are none, as it should be. Loops are to reach {reach}; nothing is
promised for others. Without instructions for bfloat16, its products are those of float32. Headings name the set that a
processor runs; "portable" is the header without intrinsics, with the same flags."""
DECODES = """\
32 keys of a head of 128, for one query row or for four that share a key. "Score" multiplies queries with keys, and
"accumulate" weights with values. Cells have the GB/s of the cache that a core reads, over everything that the call
executed, at the clock in the heading. They are to reach {reach:.0f} GB/s. Four rows take four multiply-adds for each
element, which is more than some of these cores have at that rate. Accesses of the stack in an iteration of the main
loop follow, where there are any."""
SOFTMAX = """\
Cycles per score of prefill's softmax: the maximum of a row of 256 scores, their exponentials and the sum."""
LIMITS = """\
What limits each loop that misses: the width of dispatch, a unit that is busy at least 95% of the time, or the latency
of instructions that wait for each other. Cycles are those of an iteration: in all, those that its
multiply-adds take alone, those of dispatch alone, and those that the busiest unit works."""
PEERS = """\
The loop with the most multiply-adds in matrix products of libraries inside torch's wheel, found by the symbols of their
functions. Which of them torch calls depends on the processor and on shapes. Our loops above compare with these.
torch's exponentials are left out: they are calls of functions, and which ones its softmax calls was not determined."""
PREDICTED = "none, predicted by llvm-mca"
_DECODE_REACH = 20.0  # GB/s of a core
Record = dict[str, Any]


def build() -> str:
    """arm-cycles.md."""
    result = Result.load("arm_cycles")
    names = [f"{one['name']} ({one['chip']})" for one in result.data["processors"]]
    introduction = INTRODUCTION.format(
        version=result.machine["versions"]["llvm-mca"], processors=", ".join(names[:-1]) + " and " + names[-1]
    )
    return page("64-bit Arm: predictions", introduction, *result.sourced(*blocks(result.data), device=PREDICTED))


def blocks(data: Record) -> list[str]:
    """The sections of the page."""
    reached = [f"{one['product_reach']:.0%} on {one['name']}" for one in data["processors"] if one["product_reach"]]
    found = ["## Products of prefill", PRODUCTS.format(reach=", ".join(reached)), _products(data)]
    found += ["## Decode", DECODES.format(reach=_DECODE_REACH), _decodes(data)]
    found += ["## Softmax", SOFTMAX, _softmax(data)]
    missing = _limits(data)
    found += ["## What limits the loops", LIMITS, missing] if missing else []
    return [*found, "## torch's matrix products", PEERS, _peers(data)] if data["peers"] else found


def loop_share(loop: Record) -> float:
    """The share of the peak that a loop reaches."""
    return float(loop["multiply_cycles"] / loop["cycles"])


def call_share(record: Record) -> float:
    """The share of the peak that a whole call reaches."""
    per_cycle = record["loop"]["work"] / record["loop"]["multiply_cycles"]
    return float(record["call"]["work"] / record["call"]["cycles"] / per_cycle)


def gbps(record: Record, ghz: float) -> float:
    """The bytes of the cache that a core reads in a nanosecond."""
    return float(record["call"]["work"] / record["call"]["cycles"] * ghz)


def misses(record: Record, processors: dict[str, Record]) -> bool:
    """Whether a call misses what it is to reach."""
    chip = processors[record["processor"]]
    if record["isa"] == "portable" or record["kind"] == "softmax":
        return False
    if record["loop"]["stack_accesses"]:
        return True
    if record["kind"] == "product":
        return loop_share(record["loop"]) < (chip["product_reach"] or 0.0)
    return gbps(record, chip["ghz"]) < _DECODE_REACH


def _by_name(data: Record) -> dict[str, Record]:
    return {one["name"]: one for one in data["processors"]}


def _bold(text: str, bold: bool) -> str:
    return f"**{text}**" if bold else text


def _products(data: Record) -> str:
    def cell(record: Record) -> str:
        reach = processors[record["processor"]]["product_reach"] or 0.0
        stack = record["loop"]["stack_accesses"]
        share = _bold(percent(loop_share(record["loop"])), loop_share(record["loop"]) < reach)
        return f"{share}, {percent(call_share(record))}" + (f", {_bold(str(stack), True)}" if stack else "")

    processors = _by_name(data)
    return _table(data, ("product",), cell, "share of the peak: loop, call, stack")


def _decodes(data: Record) -> str:
    def cell(record: Record) -> str:
        rate = gbps(record, processors[record["processor"]]["ghz"])
        stack = record["loop"]["stack_accesses"]
        return _bold(number(rate), rate < _DECODE_REACH) + (f", {_bold(f'{stack} stack', True)}" if stack else "")

    processors = _by_name(data)
    return _table(data, ("score", "accumulate"), cell, "GB/s of a core")


def _softmax(data: Record) -> str:
    return _table(
        data, ("softmax",), lambda record: number(record["call"]["cycles"] / record["call"]["work"]), "cycles"
    )


def _table(data: Record, kinds: tuple[str, ...], cell: Callable[[Record], str], what: str) -> str:
    processors = data["processors"]
    rows = []
    records = [record for record in data["calls"] if record["kind"] in kinds]
    for key in dict.fromkeys(_key(record) for record in records):
        cells = {record["processor"]: cell(record) for record in records if _key(record) == key}
        rows.append([_name(*key), *(cells.get(one["name"], "-") for one in processors)])
    headings = [f"{one['name']}, {one['ghz']} GHz, `{one['isa']}`" for one in processors]
    return table([what, *headings], rows)


def _key(record: Record) -> tuple[str, str, str, int]:
    kernels = "portable" if record["isa"] == "portable" else "ours"
    return kernels, record["kind"], record["dtype"], record["rows"]


def _name(kernels: str, kind: str, dtype: str, rows: int) -> str:
    shared = f", {rows} row{'s' if rows > 1 else ''}" if kind in ("score", "accumulate") else ""
    return f"{kernels}, {dtype} {kind}{shared}"


def _limits(data: Record) -> str:
    processors = _by_name(data)
    rows = []
    for record in data["calls"]:
        if not misses(record, processors):
            continue
        loop = record["loop"]
        unit, busy = max(loop["unit_cycles"].items(), key=lambda item: float(item[1]))
        stack = [str(loop["stack_accesses"])] if loop["stack_accesses"] else ["-"]
        cycles = [number(loop[f"{name}cycles"]) for name in ("", "multiply_", "dispatch_")]
        cells = [*cycles, f"{number(busy)} ({unit})", *stack]
        rows.append([_name(*_key(record)), record["processor"], loop["limit"], *cells])
    headings = ["loop", "processor", "limit", "cycles", "by multiply-adds", "by dispatch", "by busiest unit", "stack"]
    return table(headings, rows, text_columns=3) if rows else ""


def _peers(data: Record) -> str:
    def cells(records: Iterable[Record]) -> list[str]:
        found = {record["processor"]: percent(loop_share(record["loop"])) for record in records}
        return [found.get(one["name"], "-") for one in data["processors"]]

    rows = []
    for kernel in dict.fromkeys(record["kernel"] for record in data["peers"]):
        records = [record for record in data["peers"] if record["kernel"] == kernel]
        rows.append([f"{records[0]['library']}, `{kernel}`", records[0]["dtype"], *cells(records)])
    return table(["share of the peak", "dtype", *(one["name"] for one in data["processors"])], rows, text_columns=2)
