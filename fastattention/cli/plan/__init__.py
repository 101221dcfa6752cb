"""`fastattention plan`: what a device would do, predicted without it. One module a device or strategy."""
