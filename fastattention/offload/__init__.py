"""A KV cache split between a device and the CPU, for sequences that exceed the device's memory.

Code that places, moves and attends to such a cache belongs here; kernels are in backends/.

kv_store.py             CooperativeKVStore: all layers, their budgets, a step
layer.py                one layer: its pages on both sides, and attention to them
pages.py                pages and the pools that hand them out
host_memory.py          pinned CPU memory for pages
staging.py              prefetch: uploads ahead of their use
upload_controller.py    the share that hybrid steps upload, from their measured times
eviction_order.py       the order in which layers are evicted from the device
cpu_attention_queue.py  queues attention on the CPU: copies queries down and results up
cpu_attention.py        attention that the CPU computes
cpu_stream.py           work on the CPU in stream order
micro_batches.py        runs parts of a batch concurrently, each with its own thread and stream
device.py               the interface of a device, and torch's
placement.py            which layers are where, and the predicted cost; docs/internals/long-contexts.md has the model
prediction.py           the predicted time of a step
policy.py               how a decode step handles layers on the CPU: upload, attend there, or both
memory.py               the predicted bytes of a placement
model_shape.py          the sizes of a model that a placement needs
hardware.py             bandwidths of known machines
measure.py              measures the bandwidths of this machine
lengths.py              sequence lengths as tensors on the device
"""
