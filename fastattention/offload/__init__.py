"""A KV cache shared between an accelerator and the CPU, for sequences that do not fit the accelerator's memory."""
