"""The fastest plans that fit a model and a cluster."""
