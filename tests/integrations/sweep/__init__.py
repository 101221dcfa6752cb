"""Every model type of Transformers, tiny and random: fast_attention is eager attention, or refuses.

Linear layers, such as those of Qwen3-Next, are computed by Transformers' own functions beside eager attention, and by
ours beside fast_attention.

    cd tests && nice ../.venv/bin/python -m integrations.sweep           # types without a result of these versions
    cd tests && nice ../.venv/bin/python -m integrations.sweep llama t5  # these types, again

tiny.py      builds a tiny model of a type from its default configuration, and inputs for it
checks.py    computations with both kinds of attention, compared
linear.py    which linear layers of a model our functions compute
latents.py   what became of a model's latents, and of the keys that it selects
results.py   results.json, from which scripts/write_model_types.py makes a page of the documentation
__main__.py  runs types one by one and records each

Types come from Transformers' own lists, so that new ones are picked up automatically.
"""
