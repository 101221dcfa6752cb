"""Conformance tests: a list of cases, run on every backend of this machine and compared with the reference.

case.py         the fields of a case
cases.py        the list of cases; the first file to open, and to extend (quantized_cases.py: those of int8 and float8)
memory.py       how tensors lie in memory, with NaN everywhere else
caches.py       where the tokens of a cache lie in it, with and without pages
calls.py        a case and a dtype -> the call of a public function that it stands for
oracle.py       what that call must return, and how far from it a backend may be
check.py        what an engine promises of every call
engines.py      every backend of this machine, cpu once for each instruction set
strategies.py   random cases (hypothesis)
"""
