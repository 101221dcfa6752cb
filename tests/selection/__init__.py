"""The selection: every backend against slots found one by one."""
