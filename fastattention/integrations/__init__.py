"""Ways to run code written for others on fastattention. Nothing here is imported, registered or installed unasked."""
