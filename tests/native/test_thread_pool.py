"""The thread pool and queues of work under the thread sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "fastattention" / "backends" / "cpu" / "kernels"
SOURCES = ("thread_pool.cpp", "work_queue.cpp", "omp_team.cpp")


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_pool_and_queues_are_free_of_races(tmp_path: Path) -> None:
    program = tmp_path / "pool_stress"
    sources = [str(ROOT / "tests" / "native" / "pool_stress.cpp"), *(str(KERNELS / name) for name in SOURCES)]
    compiler = ["c++", "-std=c++17", "-O1", "-g", "-fsanitize=thread", f"-I{KERNELS}", "-pthread"]
    subprocess.run([*compiler, *sources, "-o", str(program)], check=True)
    environment = dict(os.environ, TSAN_OPTIONS="halt_on_error=1")
    done = subprocess.run([str(program)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
