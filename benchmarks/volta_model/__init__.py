"""What can be said of a V100 without one: its machine code read, counted and timed by a model of a multiprocessor.

Scripts beside this folder import it as `volta_model`.
"""
