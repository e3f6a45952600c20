"""echelon: train PyTorch models that are too large or too slow for one device."""

__version__ = "0.1.0"
