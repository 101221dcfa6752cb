"""Models of Transformers with linear layers compute the same by fastattention.linear as by torch's operations."""
