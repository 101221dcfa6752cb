"""The engines of attention, and the registry that chooses among them. Backends never import each other."""
