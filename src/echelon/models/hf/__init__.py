"""Weights and settings of transformers: dialects, config.json, folders."""
