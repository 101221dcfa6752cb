"""Attention on the CPU.

backend.py   what the library serves
call.py      a call of the library, set up once for all calls like it
params.py    the arguments of a call
prepared.py  calls that are set up now and run later
"""
