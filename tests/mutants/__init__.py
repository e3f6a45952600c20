"""Mutants: planted mistakes in the sources, each of which the tests that are named for it must find."""
