"""Prints which of three modules, that nothing here imports, a rank has. argv: the function that preloads."""

import json
import sys

from echelon import launching


def inspect_rank() -> list[bool]:
    return [name in sys.modules for name in ("wave", "colorsys", "this")]


if __name__ == "__main__":
    launching.preload("wave")
    getattr(launching, sys.argv[1])("colorsys")
    print(json.dumps(launching.launch(inspect_rank, 1)))
