"""Mutation tests: break the code in small ways, one at a time, and see which test fails.

    scripts/mutants                   # every mutant
    scripts/mutants NAME ...          # some of them; both write their rows of tests/mutants/results.md
    scripts/mutants --control         # their tests on unbroken code, where all must pass
    scripts/mutants --check           # only whether the lists fit the code and the tests
    scripts/mutants --workers 4       # four at a time; by default one per core

tests/mutants/*.toml has one table per mutant, one file per area:

    [name]
    file = "fastattention/attention/merge.py"   # the file that is broken
    old = "a + b"                     # text that occurs once in it
    new = "a - b"                     # its replacement
    why = "Merging adds up"           # the promise that is broken
    tests = ["tests/unit/test_merge.py"]  # files, folders, or ids of tests
    words = ["adds"]                  # optional: only tests whose id contains one of these
    env = "ascend"                    # optional: runs in .venv-ascend instead of .venv
    needs = "vnni"                    # optional: part of a flag of /proc/cpuinfo, without which no test can notice

Each worker has cores of its own, and a copy of the source tree in build/mutants with its own native library. It takes
one mutant after the other. A mutant is killed when a test fails within five minutes. An error outside a test, such as
one of the compiler, is not a kill. A mutant that needs an instruction set which the machine lacks is not run.
"""

from __future__ import annotations

import datetime
import itertools
import os
import queue
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from xml.etree import ElementTree

import tomli
import typer

ROOT = Path(__file__).parents[1]
LISTS = ROOT / "tests" / "mutants"
RESULTS = LISTS / "results.md"
COPIES = ROOT / "build" / "mutants"
LIBRARY = "libfastattention_cpu.so"
INTACT = COPIES / LIBRARY  # the native library of unbroken code
CPU_KERNELS = ("fastattention/backends/cpu/kernels/", "fastattention/backends/common/tile_range.hpp")
LIMIT = 300  # seconds a selection may take, in each tier
TIERS = ("quick", "all")
PASSED, SKIPPED = "every test passed", "every test was skipped"  # e.g. for want of an instruction set
ENVIRONMENTS = {"main": ".venv", "ascend": ".venv-ascend"}


@dataclass(frozen=True)
class Mutant:
    """One mutation, and the tests that must notice it."""

    name: str
    area: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]
    words: tuple[str, ...] = ()
    env: str = "main"
    needs: str = ""

    @property
    def can_be_noticed(self) -> bool:
        """Whether the processor has what the mutant needs."""
        return self.needs in Path("/proc/cpuinfo").read_text()

    @property
    def is_native(self) -> bool:
        """Whether the native library is built from the file."""
        return self.file.startswith(CPU_KERNELS)

    @property
    def selection(self) -> list[str]:
        """Arguments of pytest."""
        return [*self.tests, *(("-k", " or ".join(self.words)) if self.words else ())]


@dataclass(frozen=True)
class Result:
    """The result of a mutant. tier: that of the test that failed; None when none did."""

    mutant: Mutant
    tier: str | None
    test: str  # the first that failed, or why none did
    seconds: float


class BrokenRunError(Exception):
    """Raised when tests could not run, which says nothing about the mutant."""


def read_mutants() -> list[Mutant]:
    """All mutants, in the order of the lists."""
    mutants = []
    for path in sorted(LISTS.glob("*.toml")):
        for name, fields in tomli.loads(path.read_text()).items():
            lists = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
            mutants.append(Mutant(name=name, area=path.stem, **{**fields, **lists}))
    return mutants


def misfits(mutants: Sequence[Mutant]) -> list[str]:
    """Errors in the lists: names given twice, and text that does not occur exactly once."""
    problems = []
    names = [mutant.name for mutant in mutants]
    problems += [f"{name}: the name is given twice" for name in sorted({n for n in names if names.count(n) > 1})]
    for mutant in mutants:
        path = ROOT / mutant.file
        count = path.read_text().count(mutant.old) if path.exists() else 0
        if count != 1:
            problems.append(f"{mutant.name}: `old` occurs {count} times in {mutant.file}, not once")
        if mutant.old == mutant.new:
            problems.append(f"{mutant.name}: `old` and `new` are the same")
        problems += [
            f"{mutant.name}: {test} does not exist"
            for test in mutant.tests
            if not (ROOT / test.partition("::")[0]).exists()
        ]
    return problems


def empty_selections(mutants: Sequence[Mutant]) -> list[str]:
    """Selections without a test, by one collection of all their files; other environments are not checked."""
    mutants = [mutant for mutant in mutants if mutant.env == "main"]
    files = sorted({test.partition("::")[0] for mutant in mutants for test in mutant.tests})
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        "--collect-only",
        "-q",
        *files,
    ]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    ids = [line for line in collected.stdout.splitlines() if "::" in line]
    if collected.returncode != 0:
        raise BrokenRunError(f"tests cannot be collected:\n{collected.stdout}{collected.stderr}")
    return [f"{mutant.name}: its selection is empty" for mutant in mutants if not any(_selects(mutant, i) for i in ids)]


def _selects(mutant: Mutant, test_id: str) -> bool:
    chosen = any(test_id == test or test_id.startswith((f"{test}[", f"{test}::", f"{test}/")) for test in mutant.tests)
    return chosen and (not mutant.words or any(word.lower() in test_id.lower() for word in mutant.words))


class Copy:
    """A copy of the source tree with environments that import it, and not the tree that they were installed from.

    cores: those that its tests run on, with as many threads, and its compiler.
    """

    def __init__(self, number: int, cores: Sequence[int]) -> None:
        self.cores = cores
        self._folder = COPIES / str(number)
        self._report = self._folder / "report.xml"
        self._tree = self._folder / "tree"
        self._library = self._tree / "fastattention" / "backends" / "cpu" / LIBRARY
        self._sync()
        for name in ENVIRONMENTS.values():
            if (ROOT / name).exists():
                self._make_environment(name)
        self._check_imports()

    def _sync(self) -> None:
        """Copies files that git tracks or would track, without touching unchanged ones."""
        listed = _checked(["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        names = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
        for name in names:
            source, target = ROOT / name, self._tree / name
            if not target.exists() or target.read_bytes() != source.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
        for path in self._tree.rglob("*"):
            within = path.relative_to(self._tree)
            ignored = within.parts[0] in ("build", *ENVIRONMENTS.values()) or "__pycache__" in within.parts
            if path.is_file() and not ignored and path != self._library and str(within) not in names:
                path.unlink()

    def _make_environment(self, name: str) -> None:
        """Makes an environment of the original's Python that imports the copy first, then what the original imports.

        Its path holds the folders in which the original looks. Those that .pth files name are among them, but not the
        hooks by which packages are installed editable.
        """
        python = str(ROOT / name / "bin" / "python")
        _checked([python, "-m", "venv", "--clear", "--without-pip", "--symlinks", str(self._tree / name)])
        folders = _checked([python, "-c", "import sys; print(*sys.path[1:], sep='\\n')"])
        (target,) = (self._tree / name).glob("lib/python*/site-packages")
        (target / "copy.pth").write_text(f"{self._tree}\n{folders}")

    def _check_imports(self) -> None:
        """Raises BrokenRunError unless the copy is what its environment imports."""
        code = "import fastattention; print(fastattention.__file__)"
        imported = _checked([str(self._tree / ".venv" / "bin" / "python"), "-c", code], cwd=self._folder).strip()
        if imported != str(self._tree / "fastattention" / "__init__.py"):
            raise BrokenRunError(f"the copy's environment imports {imported}")

    def build(self) -> Path:
        """Builds the native library, as far as it is not up to date, and returns it. Raises BrokenRunError."""
        native = self._folder / "native"
        if not (native / "CMakeCache.txt").exists():
            # Compiles in a third of the time of -O3. Kernels inline by attribute, and their results stay the same.
            optimize = ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG"]
            _checked(["cmake", "-S", str(self._tree), "-B", str(native), *optimize])
        _checked(["cmake", "--build", str(native), "--parallel", str(len(os.sched_getaffinity(0)))])
        (built,) = native.glob(f"fastattention/**/{LIBRARY}")
        return built

    def run(self, mutant: Mutant) -> Result:
        """Breaks the copy, runs the tests, and repairs it. Raises BrokenRunError."""
        path = self._tree / mutant.file
        intact = path.read_text()
        try:
            path.write_text(intact.replace(mutant.old, mutant.new))
            return self.test(mutant, self.build() if mutant.is_native else INTACT)
        finally:
            path.write_text(intact)

    def test(self, mutant: Mutant, library: Path = INTACT) -> Result:
        """Runs the tests of a mutant, by tier, until one fails. Raises BrokenRunError."""
        shutil.copy2(library, self._library)
        begin = time.monotonic()
        for tier in TIERS if mutant.env == "main" else TIERS[-1:]:  # `make test` runs nothing in other environments
            failed = self._first_failure(mutant, tier)
            if failed is not None:
                return Result(mutant, tier, failed, time.monotonic() - begin)
        ran = any(case.find("skipped") is None for case in ElementTree.parse(self._report).iter("testcase"))
        return Result(mutant, None, PASSED if ran else SKIPPED, time.monotonic() - begin)

    def _first_failure(self, mutant: Mutant, tier: str) -> str | None:
        log = self._folder / "log.txt"
        self._report.unlink(missing_ok=True)
        python = self._tree / ENVIRONMENTS[mutant.env] / "bin" / "python"
        command = [str(python), "-m", "pytest", *mutant.selection, "-x", "--tier", tier, "-p", "no:cacheprovider"]
        command += ["-o", "junit_family=xunit1", f"--junitxml={self._report}"]
        environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        try:
            with log.open("wb") as output:  # no pipe: processes that a killed test leaves behind would keep it open
                done = subprocess.run(
                    command, cwd=self._tree, env=environment, stdout=output, stderr=output, timeout=LIMIT, check=False
                )
        except subprocess.TimeoutExpired:
            raise BrokenRunError(f"no verdict of tier {tier} after {LIMIT} s") from None
        if done.returncode == 0 or (done.returncode == 5 and tier != TIERS[-1]):  # 5: no test selected
            return None
        failures = list(_failures(self._report)) if self._report.exists() else []
        if done.returncode != 1 or not failures:
            said = log.read_text(errors="replace")[-3000:]
            raise BrokenRunError(f"pytest ended with {done.returncode} and no failed test:\n{said}")
        return failures[0]


def _failures(report: Path) -> Iterator[str]:
    """Ids of failed tests, without those that an error kept from running."""
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None:
            yield f"{case.get('file', '').removeprefix('tests/')}::{case.get('name')}"


def _checked(command: Sequence[str], cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BrokenRunError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def run_all(mutants: Sequence[Mutant], control: bool, workers: int) -> list[Result]:
    """Results of mutants, in their order; of their tests on unbroken code when `control`. Raises BrokenRunError."""
    cores = sorted(os.sched_getaffinity(0))
    bounds = [i * len(cores) // workers for i in range(workers + 1)]
    shares = [cores[begin:end] or cores for begin, end in itertools.pairwise(bounds)]
    idle: queue.SimpleQueue[Copy] = queue.SimpleQueue()

    def run(mutant: Mutant) -> Result:
        if not mutant.can_be_noticed:
            return Result(mutant, None, f"not run: this machine lacks {mutant.needs}", 0.0)
        copy = idle.get()
        os.sched_setaffinity(0, copy.cores)  # of this thread, and of the processes that it starts
        try:
            result = copy.test(mutant) if control else copy.run(mutant)
        except BrokenRunError as error:
            result = Result(mutant, None, str(error), 0.0)
        finally:
            idle.put(copy)
        print(f"{result.seconds:5.0f} s  {result.tier or '-':6} {mutant.name}: {result.test}", flush=True)
        return result

    with ThreadPoolExecutor(workers) as pool:
        copies = list(pool.map(Copy, range(workers), shares))
        shutil.copy2(copies[0].build(), INTACT)
        for copy in copies:
            idle.put(copy)
        return list(pool.map(run, mutants))


COLUMNS = ("Mutant", "Area", "Broken promise", "Tier", "Seconds", "Commit", "Killed by")


def record(results: Sequence[Result], page: Path) -> None:
    """Writes rows of these results into the table of a page, in the order of the lists. Rows of other mutants stay."""
    commit = _checked(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]).strip()
    rows = _read_rows(page)
    for result in results:
        test = result.test.partition("\n")[0].replace("|", "\\|")
        mutant, tier = result.mutant, result.tier or ("survived" if result.mutant.can_be_noticed else "-")
        rows[mutant.name] = [
            mutant.name, mutant.area, mutant.why, tier, f"{result.seconds:.0f}", commit, f"`{test}`",
        ]  # fmt: skip
    names = [mutant.name for mutant in read_mutants()]
    kept = [rows[name] for name in names if name in rows]
    quick, killed = (sum(row[3] in tiers for row in kept) for tiers in (("quick",), TIERS))
    lines = [
        "# Mutants",
        "",
        "Each mutant is one small break of the code. It is killed when a test fails.",
        f"`scripts/mutants` writes the rows of those that it runs, the last time on {datetime.date.today()}.",
        "",
        f"- mutants: {len(names)}, of which {len(names) - len(kept)} have no result",
        f"- killed in tier `all`: {killed} ({killed / len(names):.0%})",
        f"- killed in tier `quick`: {quick} ({quick / len(names):.0%})",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
        *(f"| {' | '.join(row)} |" for row in kept),
    ]
    page.write_text("\n".join(lines) + "\n")


def _read_rows(page: Path) -> dict[str, list[str]]:
    """The rows of the table of a page, by the name of their mutant."""
    lines = page.read_text().splitlines() if page.exists() else []
    rows = [re.split(r"(?<!\\) ?\| ?", line)[1:-1] for line in lines if line.startswith("| ")]
    return {row[0]: row for row in rows if len(row) == len(COLUMNS) and row[0] != COLUMNS[0]}


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Mutants to run; all when none is given.")] = None,
    show: Annotated[bool, typer.Option("--list", help="Only print names and promises.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Only check the lists.")] = False,
    control: Annotated[bool, typer.Option("--control", help="Run the tests on unbroken code: all must pass.")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Mutants at a time; default: one per core.")] = None,
    output: Annotated[Path, typer.Option(help="The page with the table of results.")] = RESULTS,
) -> None:
    """Break the code in small ways, one at a time, and see which test fails."""
    mutants = read_mutants()
    unknown = set(names or ()) - {mutant.name for mutant in mutants}
    problems = [f"there is no mutant {name}" for name in sorted(unknown)] + misfits(mutants)
    if check and not problems:
        problems = empty_selections(mutants)
    if problems:
        sys.exit("\n".join(problems))
    chosen = [mutant for mutant in mutants if not names or mutant.name in names]
    if show:
        print("\n".join(f"{mutant.area:12} {mutant.name:40} {mutant.why}" for mutant in chosen))
    if show or check:
        return
    results = run_all(chosen, control, min(workers or len(os.sched_getaffinity(0)), len(chosen)))
    killed = sum(result.tier is not None for result in results)
    print(f"{killed} killed, {len(results) - killed} not")
    if control:
        wrong = [result for result in results if result.test not in (PASSED, SKIPPED)]
    else:
        wrong = [result for result in results if result.tier is None and result.mutant.can_be_noticed]
        record(results, output)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
