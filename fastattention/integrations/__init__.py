"""Adapters that let code written for other libraries run on fastattention. None of them is active unless imported.

flash_attn.py  stands in for the flash_attn package
transformers/  Hugging Face Transformers: attention implementation, cache, tensor parallelism, server
"""
