"""Tests of the dispatch to torch_npu's operators, with the real torch_npu but no NPU.

environment.py           whether torch_npu is installed; imports it
acl_stub.py acl_stub.c   libraries in the place of CANN's: torch_npu can be imported, and its NPU's memory is the host's
host_npu.py              the device npu on that memory, whose operators the CPU computes
reference.py             attention as the vendor documents its operators, for a single sequence
training.py inference.py the two operators for tensors on a CPU, strict about their arguments
training_gradients.py    the operator of their gradients, for tensors on a CPU too
selection.py             the indexer, and attention to selected keys, for tensors on a CPU too
communication.py         the product with its all-reduce, for tensors on a CPU too; ranks are threads
engine.py                a backend that knows nothing but the vendor's operators
test_conformance.py      the list of cases on it
gradient_cases.py        the cases whose gradients are served, and the right results
test_gradients.py        gradients, and the calls that are made for them
test_gradient_refusals.py which gradients are refused; needs no torch_npu
test_calls.py            the arguments against real schemas and real shape inference; what must never be called
test_int8.py             int8 caches: their scales as they are handed over, and when they are copied
test_indexer.py          the indexer: arguments, results, refusals, and calls on the device npu
test_selected.py         latents that queries select: arguments, results, refusals, and calls on the device npu
test_linear_all_reduce.py the product with its all-reduce
test_projection.py       the same as the projection of a module that torch has parallelized
test_host_npu.py         the device npu in host memory
test_transformers.py     models of Transformers on it, with our kernels and the vendor's operators
test_kernels.py          the kernels for tensors on a CPU refuse what they should
"""
