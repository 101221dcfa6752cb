"""A server of the OpenAI API: every request sampled by its own parameters, all batched on fast_attention.

protocol.py and messages.py read requests, prompts.py turns them into tokens, and app.py has the routes. exchange.py
follows a request until it is answered. engine.py runs the batch in a thread of its own, with sampling.py to choose
tokens, grammar.py to constrain them and text.py to spell them. tools.py finds tool calls in text, answers.py writes the
JSON, metrics.py counts, and server.py starts and ends it all.
"""
