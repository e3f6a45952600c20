"""Signs of life of ranks, and what is done and said when one is lost."""
