"""What can be said of a V100 without one: its machine code read, counted and timed by a model of a multiprocessor.

Scripts beside this folder import it as `volta_model`. The way in: kernels.ours and kernels.theirs give a Model of a
kernel, Model.predict what it says of a problem, counts.split what a warp issues.
"""
