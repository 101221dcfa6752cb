"""A performance model of Ascend chips: predicts the time of a call, and where it is spent. Nothing here is measured.

From the inside out: events.py (operations, pipes and shared paths), core.py (what an AI Core does for a tile),
row_block.py (one tile of queries), memory.py (what a core gets of cache and memory), whole_chip.py (a call).
workload.py and tiles.py describe the input; calibration.py and published.py have the constants and the published
figures. gains.py compares strategies, and standard.py models attention without tiling.
"""
