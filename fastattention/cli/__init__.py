"""The command line, `fastattention`: main.py has the options, and each command has a module or package of its own.

bench/ measures, plan/ predicts, and compile.py, demo.py, generate.py, info.py and warmup.py are one command each.
"""
