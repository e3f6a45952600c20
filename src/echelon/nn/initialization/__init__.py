"""Deferred start: a model is built without memory, and each rank fills only what it holds."""
