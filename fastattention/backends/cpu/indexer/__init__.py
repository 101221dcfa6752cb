"""The indexer on the CPU.

backend.py  what the library serves
call.py     a call of the library, set up once for all calls like it
"""
