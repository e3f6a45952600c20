"""Modules: how one is called, wrapped, listed in layers, started and changed for a plan."""
