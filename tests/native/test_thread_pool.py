"""The thread pool and queues of work under the thread sanitizer, and with memory to work in under forks."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tiers import slow

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "fastattention" / "backends" / "cpu" / "kernels"

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")


def run_program(folder: Path, name: str, sources: tuple[str, ...], options: tuple[str, ...]) -> None:
    """Builds tests/native/NAME.cpp with sources of the kernels, and runs it."""
    program = folder / name
    files = [str(ROOT / "tests" / "native" / f"{name}.cpp"), *(str(KERNELS / source) for source in sources)]
    compiler = ["c++", "-std=c++17", "-O1", "-g", *options, f"-I{KERNELS}", "-pthread"]
    subprocess.run([*compiler, *files, "-o", str(program)], check=True)
    environment = dict(os.environ, TSAN_OPTIONS="halt_on_error=1")
    done = subprocess.run([str(program)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@slow
def test_pool_and_queues_are_free_of_races(tmp_path: Path) -> None:
    sources = ("common/thread_pool.cpp", "common/work_queue.cpp", "common/omp_team.cpp")
    run_program(tmp_path, "pool_stress", sources, ("-fsanitize=thread",))


def test_a_fork_finds_no_lock_held(tmp_path: Path) -> None:
    sources = ("common/thread_pool.cpp", "common/omp_team.cpp", "common/arena.cpp")
    run_program(tmp_path, "fork_stress", sources, ())
