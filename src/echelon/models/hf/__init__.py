"""Weights and settings of transformers: names, dialects, experts."""
