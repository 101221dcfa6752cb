"""Conformance tests: a list of cases, run on every backend of this machine and compared with the reference.

`fastattention.testing` says what a case is, which call it stands for, and what that must return. Here are:

cases.py        the list of cases; the first file to open, and to extend (quantized_cases.py: those of int8 and float8)
strategies.py   random cases (hypothesis)
engines.py      every backend of this machine, cpu once for each instruction set
check.py        what an engine promises of every call
gradients.py    what it promises of gradients
"""
