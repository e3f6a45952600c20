"""The command `echelon`. Thin: every command reads its arguments, calls the library and prints."""

from echelon.cli.main import main

__all__ = ["main"]
