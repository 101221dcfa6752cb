"""Mutation tests: break the code in small ways, one at a time, and see which test fails.

    scripts/mutants                   # every mutant; writes tests/mutants/results.md
    scripts/mutants NAME ...          # some of them
    scripts/mutants --control         # their tests on unbroken code, where all must pass
    scripts/mutants --check           # only whether the lists fit the code and the tests

tests/mutants/*.toml has one table per mutant, one file per area:

    [name]
    file = "fastattention/attention/merge.py"   # the file that is broken
    old = "a + b"                     # text that occurs once in it
    new = "a - b"                     # its replacement
    why = "Merging adds up"           # the promise that is broken
    tests = ["tests/unit/test_merge.py"]  # files, folders, or ids of tests
    words = ["adds"]                  # optional: only tests whose id contains one of these
    env = "ascend"                    # optional: runs in .venv-ascend instead of .venv

Tests run on a copy of the source tree in build/mutants, which has its own native library. A mutant is killed when a
test fails within two minutes. An error outside a test, such as one of the compiler, is not a kill.
"""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from xml.etree import ElementTree

import tomli
import typer

ROOT = Path(__file__).parents[1]
LISTS = ROOT / "tests" / "mutants"
RESULTS = LISTS / "results.md"
COPY = ROOT / "build" / "mutants" / "tree"
NATIVE = ROOT / "build" / "mutants" / "native"
LIBRARY = "libfastattention_cpu.so"
CPU_KERNELS = ("fastattention/backends/cpu/kernels/", "fastattention/backends/common/tile_range.hpp")
LIMIT = 120  # seconds a selection may take, in each tier
TIERS = ("quick", "all")
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
    """A copy of the source tree with environments that import it, and not the tree that they were installed from."""

    def __init__(self) -> None:
        self._sync()
        for name in ENVIRONMENTS.values():
            if (ROOT / name).exists():
                self._make_environment(name)
        self._library = COPY / "fastattention" / "backends" / "cpu" / LIBRARY
        self.build()
        self._intact = NATIVE / f"intact-{LIBRARY}"
        shutil.copy2(self._library, self._intact)

    def _sync(self) -> None:
        """Copies files that git tracks or would track, without touching unchanged ones."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        names = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
        for name in names:
            source, target = ROOT / name, COPY / name
            if not target.exists() or target.read_bytes() != source.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
        for path in COPY.rglob("*"):
            top = path.relative_to(COPY).parts[0]
            ignored = top in ("build", *ENVIRONMENTS.values()) or "__pycache__" in path.parts or path.name == LIBRARY
            if path.is_file() and not ignored and str(path.relative_to(COPY)) not in names:
                path.unlink()

    def _make_environment(self, name: str) -> None:
        """Makes an environment with the copy and the packages of the original, without editable installations.

        A line of a .pth file is added to the path; .pth files in the folder that it names are not read.
        """
        if not (COPY / name).exists():
            venv.create(COPY / name, symlinks=True)
        (packages,) = (ROOT / name).glob("lib/python*/site-packages")
        (target,) = (COPY / name).glob("lib/python*/site-packages")
        (target / "copy.pth").write_text(f"{COPY}\n{packages}\n")

    def build(self) -> None:
        """Builds the native library where it is out of date. Raises BrokenRunError."""
        if not (NATIVE / "CMakeCache.txt").exists():
            # This compiles in a third of the time of -O3. Kernels inline by attribute, so their results stay the same.
            optimize = ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG"]
            _checked(["cmake", "-S", str(COPY), "-B", str(NATIVE), *optimize])
        _checked(["cmake", "--build", str(NATIVE), "--parallel", str(len(os.sched_getaffinity(0)))])
        (built,) = NATIVE.glob(f"fastattention/**/{LIBRARY}")
        shutil.copy2(built, self._library)

    def check_imports(self) -> None:
        """Raises BrokenRunError unless the copy is what its environment imports."""
        code = "import fastattention; print(fastattention.__file__)"
        imported = _checked([str(COPY / ".venv" / "bin" / "python"), "-P", "-c", code]).strip()
        if imported != str(COPY / "fastattention" / "__init__.py"):
            raise BrokenRunError(f"the copy's environment imports {imported}")

    def run(self, mutant: Mutant) -> Result:
        """Breaks the copy, runs the tests, and repairs it. Raises BrokenRunError."""
        path = COPY / mutant.file
        intact = path.read_text()
        try:
            path.write_text(intact.replace(mutant.old, mutant.new))
            if mutant.is_native:
                self.build()
            return self.test(mutant)
        finally:
            path.write_text(intact)
            shutil.copy2(self._intact, self._library)

    def test(self, mutant: Mutant) -> Result:
        """Runs the tests of a mutant, by tier, until one fails. Raises BrokenRunError."""
        begin = time.monotonic()
        for tier in TIERS if mutant.env == "main" else TIERS[-1:]:  # `make test` runs nothing in other environments
            failed = self._first_failure(mutant, tier)
            if failed is not None:
                return Result(mutant, tier, failed, time.monotonic() - begin)
        return Result(mutant, None, "every test passed", time.monotonic() - begin)

    def _first_failure(self, mutant: Mutant, tier: str) -> str | None:
        report = NATIVE / "report.xml"
        report.unlink(missing_ok=True)
        python = COPY / ENVIRONMENTS[mutant.env] / "bin" / "python"
        command = [str(python), "-m", "pytest", *mutant.selection, "-x", "--tier", tier, "-p", "no:cacheprovider"]
        command += ["-o", "junit_family=xunit1", f"--junitxml={report}"]
        environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        try:
            done = subprocess.run(
                command, cwd=COPY, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
            )
        except subprocess.TimeoutExpired:
            raise BrokenRunError(f"no verdict of tier {tier} after {LIMIT} s") from None
        if done.returncode == 0 or (done.returncode == 5 and tier != TIERS[-1]):  # 5: no test selected
            return None
        failures = list(_failures(report)) if report.exists() else []
        if done.returncode != 1 or not failures:
            raise BrokenRunError(f"pytest ended with {done.returncode} and no failed test:\n{done.stdout[-3000:]}")
        return failures[0]


def _failures(report: Path) -> Iterator[str]:
    """Ids of failed tests, without those that an error kept from running."""
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None:
            yield f"{case.get('file', '').removeprefix('tests/')}::{case.get('name')}"


def _checked(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BrokenRunError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def table(results: Sequence[Result], minutes: float) -> str:
    """The results as a page."""
    commit = _checked(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]).strip()
    quick, killed = (sum(result.tier in tiers for result in results) for tiers in (("quick",), TIERS))
    lines = [
        "# Mutants",
        "",
        "Each mutant is one small break of the code. It is killed when a test fails.",
        f"Written by `scripts/mutants` on {datetime.date.today()} at commit {commit}, in {minutes:.0f} minutes.",
        "",
        f"- mutants: {len(results)}",
        f"- killed in tier `all`: {killed} ({killed / len(results):.0%})",
        f"- killed in tier `quick`: {quick} ({quick / len(results):.0%})",
        "",
        "| Mutant | Area | Broken promise | Tier | Seconds | Killed by |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        cells = (result.mutant.name, result.mutant.area, result.mutant.why, result.tier or "survived")
        test = result.test.replace("|", "\\|")
        lines.append(f"| {' | '.join(cells)} | {result.seconds:.0f} | `{test}` |")
    return "\n".join(lines) + "\n"


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Mutants to run; all when none is given.")] = None,
    show: Annotated[bool, typer.Option("--list", help="Only print names and promises.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Only check the lists.")] = False,
    control: Annotated[bool, typer.Option("--control", help="Run the tests on unbroken code: all must pass.")] = False,
    output: Annotated[Path, typer.Option(help="Where the table goes when every mutant was run.")] = RESULTS,
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
    begin = time.monotonic()
    copy = Copy()
    copy.check_imports()
    results = []
    for mutant in chosen:
        try:
            result = copy.test(mutant) if control else copy.run(mutant)
        except BrokenRunError as error:
            result = Result(mutant, None, str(error), 0.0)
        results.append(result)
        state = f"{result.seconds:5.0f} s  {result.tier or '-':6} {mutant.name}: {result.test}"
        print(state, flush=True)
    killed = sum(result.tier is not None for result in results)
    print(f"{killed} killed, {len(results) - killed} not")
    if control:
        wrong = [result for result in results if result.test != "every test passed"]
    else:
        wrong = [result for result in results if result.tier is None]
        if not names:
            output.write_text(table(results, (time.monotonic() - begin) / 60))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
