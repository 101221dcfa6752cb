"""The engine that serves calls of any operator: registry, plans, explanations, operators of torch."""
