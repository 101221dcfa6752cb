"""Adapters that let code written for other libraries run on fastattention. None of them is active unless imported.

flash_attn/    stands in for FlashAttention 2, 3 and 4
kernel_hub.py  the functions of a folder that Transformers loads through the kernels package
pytorch.py     stands in for torch.nn.functional.scaled_dot_product_attention
transformers/  Hugging Face Transformers: attention implementation, cache, tensor parallelism, server
"""
