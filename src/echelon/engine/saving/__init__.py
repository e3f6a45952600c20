"""Checkpoints of an engine: saving, loading into another plan, exporting."""
