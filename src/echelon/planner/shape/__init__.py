"""Shapes of models as plain data: from presets, and from files of Hugging Face."""
