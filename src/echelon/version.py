"""The version of echelon."""

VERSION = "0.1.0"
