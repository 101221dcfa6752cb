"""A performance model of the Ascend 910B: predicts the time of a call, and where it is spent. Nothing here is measured.

From the inside out: events.py and memory.py (time on one core), core.py (an AI Core), row_block.py (one tile of
queries), whole_chip.py (a call). workload.py and tiles.py describe the input; calibration.py and published.py have
the constants and the published figures. estimate.py is a coarse and fast variant, gains.py compares strategies, and
standard.py models attention without tiling.
"""
