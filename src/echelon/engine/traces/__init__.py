"""Traces: when each instruction and each collective of some steps ran, on every rank, for Perfetto."""
