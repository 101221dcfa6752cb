"""The sdpa backend, the fallback on any device: torch's SDPA where it supports the arguments, plain torch otherwise.

backend.py      checks a call and joins the results of its parts
parts.py        groups the sequences of a call by length
fused.py        torch's scaled_dot_product_attention; gpu_kernels.py its kernels on GPUs
cudnn_prefill.py  which calls are faster by cuDNN than by our kernels; causal_split.py makes two of one for it
math.py         plain torch
masks.py        chunks of query rows and their masks; chunked.py computes them one after another
"""
