"""A KV cache shared between a device and the CPU, for sequences that the device's memory cannot hold.

kv_store.py       CooperativeKVStore: all layers, their budgets, a step
layer.py          one layer: its pages on both sides, and attention to them
pages.py          pages and the pools that hand them out; host_memory.py has those of the CPU
staging.py        uploads ahead of their use
balance.py        how much of a hybrid is uploaded, by what its steps take
hand_over.py      queries down to the CPU, results up
cpu_attention.py  what the CPU is to do with them
micro_batches.py  parts of a batch at once, each in a thread and a line of computation of its own
device.py         what is asked of a device
placement.py      which layers go where, and what that costs; docs/internals/long-contexts.md has the model
prediction.py     the time of a step
measure.py        the bandwidths of this machine
"""
