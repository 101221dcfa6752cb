"""Transformers' server of the OpenAI API, with requests batched on fast_attention. `fastattention serve` starts it.

server.py starts and stops it; requests.py generates each request, and refuses fields that it cannot honor.
"""
