"""A performance model of the V100: reads, counts and times machine code on a model of a multiprocessor.

Scripts beside this folder import it as `volta_model`. The way in: kernels.ours and kernels.theirs give a Model of a
kernel, Model.predict what it says of a problem, counts.split what a warp issues.
"""
