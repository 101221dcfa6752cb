"""The question "model": a whole model by eager, sdpa and fast_attention, with random weights.

build.py    a model of Transformers in a named shape, or in that of a folder
decode.py   a token after a prompt, one by one or replayed from a CUDA graph
measure.py  prefill, decode and peak memory of one batch and length, all attentions in turns
report.py   tables, JSON and the picture
command.py  the grid of batches and lengths
"""
