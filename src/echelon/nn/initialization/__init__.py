"""Deferred start: a model is built without memory, and each rank fills only what it holds."""

from echelon.nn.initialization.initial_values import WeightSource, deferred, is_deferred, named_tensors

__all__ = ["WeightSource", "deferred", "is_deferred", "named_tensors"]
