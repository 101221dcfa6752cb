"""Limits of the system, and signals in the middle of a call, end no process and change no result.

Every test runs a process of its own, with real limits, forks and signals.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from tiers import deep, slow

# The beginning of all scripts. Limits on threads do not bind root, hence another user, with a single process.
COMMON = """
import ctypes, os, resource, signal, sys, threading, time
import torch
import fastattention
from fastattention import fast_attn_func
from fastattention.backends.cpu.library import load_library
from fastattention.backends.cpu.torch_threads import OpenMp
from fastattention.backends.cpu.work_queue import WorkQueue
from fastattention.offload.cpu_attention import prepare_attention
from fastattention.attention.validation import KvCacheArguments, Options

torch.set_num_threads(1)  # torch's own threads are no part of this
q, k, v = torch.randn(3, 2, 300, 4, 64).unbind(0)
k_cache = torch.randn(2, 4096, 1, 64)
out, lse = torch.empty(2, 1, 4, 64), torch.empty(2, 4, 1)
work = prepare_attention(
    KvCacheArguments(q[:, :1], k_cache, k_cache, cache_seqlens=4000), Options(), out, lse, num_threads=4
)

def attend():
    return fast_attn_func(q, k, v, causal=True, backend="cpu")

def decode():
    out.zero_()
    work.run()
    return out.clone()

def threads():
    return set(os.listdir("/proc/self/task"))

def allow_threads(more):
    if os.geteuid() == 0:
        os.setuid(1_000_000 + os.getpid())
    most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    resource.setrlimit(resource.RLIMIT_NPROC, (most if more is None else len(threads()) + more, most))

def allow_memory(more):
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, -1))

fastattention.set_num_threads(1)
expected = attend()
fastattention.set_num_threads(4)
"""


def run_script(script: str) -> str:
    """The output of a script."""
    done = subprocess.run([sys.executable, "-c", COMMON + script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def may_lower_limits() -> bool:
    """Whether RLIMIT_NPROC binds: not in containers that map no other user."""
    probe = "import os, resource; os.geteuid() or os.setuid(1_000_000 + os.getpid())"
    return subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode == 0


limited = pytest.mark.skipif(not may_lower_limits(), reason="needs a user whose threads can be limited")


@limited
@pytest.mark.parametrize("more", [0, pytest.param(2, marks=deep)])
def test_a_call_goes_on_with_the_threads_it_can_have(more: int) -> None:
    script = f"""
allow_threads({more})
before = len(threads())
for _ in range(3):
    assert torch.equal(attend(), expected)
few, decoded = len(threads()) - before, decode()
allow_threads(None)
assert torch.equal(attend(), expected)
assert torch.equal(decode(), decoded)
print(few, len(threads()) - before)
"""
    assert run_script(script) == f"{more} 3"  # and with all of them as soon as they can be had


@slow
@limited
def test_a_queue_without_a_thread_is_an_error() -> None:
    script = """
numbers = torch.zeros(2, dtype=torch.uint32)
load_library()
allow_threads(0)
try:
    WorkQueue(*numbers)
except MemoryError as error:
    print(error)
"""
    assert "could not start a thread" in run_script(script)


# A fake OpenMP that seems awake: the library asks it first, and no thread need be at work.
OPENMP = """
teams, members = [], [0]

@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
def parallel(function, data, num_threads, flags):
    teams.append(threading.get_ident())
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(data)

@ctypes.CFUNCTYPE(ctypes.c_int)
def max_threads():
    found, members[0] = members[0], 5
    return found

load_library().set_omp_team(OpenMp(*(ctypes.cast(one, ctypes.c_void_p).value for one in (parallel, max_threads))))

def attend_by_a_team():
    members[0] = 0
    time.sleep(0.05)
    return attend()
"""


@limited
@pytest.mark.parametrize(("more", "used"), [(3, False), pytest.param(4, True, marks=deep)])
def test_a_team_that_openmp_could_not_start_is_not_asked_for(more: int, used: bool) -> None:
    script = f"""
allow_threads({more})
assert torch.equal(attend_by_a_team(), expected)
print(teams != [])
"""
    assert run_script(OPENMP + script) == str(used)


@slow
def test_lists_that_find_no_memory_are_a_memory_error() -> None:
    # 300,000 sequences, for each of which the library keeps some 200 bytes.
    script = """
many = torch.zeros(300_000, 1, 1, 8)
out, lse = torch.empty_like(many), torch.empty(300_000, 1, 1)
arguments = KvCacheArguments(many, many, many, cache_seqlens=1)
work = prepare_attention(arguments, Options(), out, lse, num_threads=2)
allow_memory(30 << 20)
for call in (lambda: fast_attn_func(many, many, many, backend="cpu"), work.run):
    try:
        call()
    except MemoryError as error:
        print(error)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
assert out.isnan().all() and lse.isnan().all()
work.run()
assert not out.isnan().any()
assert torch.equal(attend(), expected)
"""
    assert run_script(script).count("fastattention could not get memory") == 2


@slow
def test_forks_in_the_middle_of_calls_leave_children_that_work() -> None:
    script = """
few = decode()
def keep(call):
    while not over.is_set():
        call()
over = threading.Event()
busy = [threading.Thread(target=keep, args=(call,)) for call in (attend, attend, work.run)]
for thread in busy:
    thread.start()
ends = []
for _ in range(60):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends one that waits for a thread that it does not have
        right = torch.equal(attend(), expected) and torch.equal(decode(), few)
        os._exit(0 if right else 1)
    ends.append(os.waitpid(child, 0)[1])
    if ends[-1]:
        break
over.set()
for thread in busy:
    thread.join()
print(set(ends))
"""
    assert run_script(script) == "{0}"


@slow
def test_threads_of_the_library_leave_signals_to_those_of_the_program() -> None:
    script = """
before = threads()
queue = WorkQueue(*torch.zeros(2, dtype=torch.uint32))
attend()
ours = threads() - before
def blocked_by(thread):
    lines = open(f"/proc/self/task/{thread}/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("SigBlk")).split()[1], 16)
for thread in ours:
    # A thread that starts blocks all signals, and a call does not wait for one that has not begun to help.
    for _ in range(100):
        blocked = blocked_by(thread)
        if not blocked >> (signal.SIGSEGV - 1) & 1:
            break
        time.sleep(0.1)
    for number, is_blocked in {signal.SIGINT: 1, signal.SIGTERM: 1, signal.SIGCHLD: 1, signal.SIGSEGV: 0}.items():
        assert blocked >> (number - 1) & 1 == is_blocked, (number, hex(blocked))
assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
print(len(ours))
"""
    assert run_script(script) == "4"


@slow
def test_an_interrupt_comes_after_the_call_which_is_done() -> None:
    script = """
queries = torch.randn(1, 4096, 4, 64)
keys = torch.randn(1, 1 << 14, 1, 64)
out, lse = torch.zeros_like(queries), torch.zeros(1, 4, 4096)
arguments = KvCacheArguments(queries, keys, keys, cache_seqlens=1 << 14)
work = prepare_attention(arguments, Options(), out, lse, num_threads=2)
timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
try:
    timer.start()
    work.run()
    timer.join()
except KeyboardInterrupt:
    print("interrupted")
found = out.clone()
work.run()
assert torch.equal(out, found)
assert torch.equal(attend(), expected)
"""
    assert run_script(script) == "interrupted"
