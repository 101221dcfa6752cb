"""Linear attention: every backend against the recurrence in float64."""
