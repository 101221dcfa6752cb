"""The native backend for CPUs."""
