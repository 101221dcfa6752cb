"""Selection: the slots of the keys that indices name, for each query.

problem.py    what one call asks for
backend.py    the interface of backends, and their list
operators.py  the operator: validation, and how its calls are served
"""
