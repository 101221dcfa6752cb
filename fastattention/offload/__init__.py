"""CPU-GPU cooperative KV cache: some layers keep their keys and values in host memory, for sequences a GPU cannot hold.

`placement` decides which layers and predicts what that costs. docs/long_context.md has the model.
"""
