"""`fastattention bench`: measures attention on this machine, against other implementations.

command.py                  the command; session.py runs questions and writes reports
suite.py, workload.py       questions as lists of workloads
peers/                      the implementations that are compared
measure.py, timing.py       interleaved timing; accuracy.py compares with float64, peaks.py finds the machine's limits
report.py, plot.py          tables, JSON and charts
gpu*.py, npu.py             the questions about GPUs and NPUs
"""
