"""A performance model of the V100: reads, counts and times machine code on a model of a multiprocessor.

Scripts next to this folder import it as `volta_model`. To start: kernels.ours and kernels.theirs give a Model of a
kernel, Model.predict its prediction for a problem, and counts.split the instructions that a warp issues.
"""
