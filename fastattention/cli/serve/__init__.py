"""`fastattention serve`: Transformers' server of the OpenAI API, with requests batched on fast_attention.

command.py starts and stops it; requests.py says how each request is generated, and refuses what cannot be.
"""
