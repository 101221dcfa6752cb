"""A model of an Ascend 910B in time: what attention would take on it, and where the time goes. All of it predicted."""
