"""A tier of pages in host memory for continuous batching.

lane.py       requests whose pages are in host memory, in steps of their own beside those of the GPU
tiers.py      which requests are where, and how they move
attention.py  attention of one layer to pages in host memory
"""
