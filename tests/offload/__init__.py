"""Tests of the offloaded KV cache, on a fake device that simulates copies and a clock (fake_device.py)."""
