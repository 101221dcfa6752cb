"""What serves the calls of any operator: registry, plans, explanations, operators of torch."""
