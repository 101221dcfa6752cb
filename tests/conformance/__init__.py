"""Conformance tests: a list of cases, run on every backend of this machine and compared with the reference.

case.py         the fields of a case
cases.py        the list of cases; the first file to open, and to extend (quantized_cases.py: those of int8 and float8)
memory.py       memory layouts of tensors, with NaN everywhere else
caches.py       positions of the tokens of a cache, with and without pages
calls.py        a case and a dtype -> the call of a public function that it stands for
oracle.py       the exact results of that call, and the allowed errors
check.py        the promises of an engine for every call
engines.py      every backend of this machine, cpu once for each instruction set
strategies.py   random cases (hypothesis)
"""
