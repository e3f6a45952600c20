"""Devices, links and clusters as plain data: by name, and from TOML files."""
