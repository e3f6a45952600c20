"""Recompute: saved activations are dropped in the forward pass and computed again in the backward pass."""
