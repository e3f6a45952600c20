"""Checkpoints of other systems as tensors by name: read one after the other, never all at once."""
