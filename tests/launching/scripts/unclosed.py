"""Prints whether torch was loaded before this module was imported: here, and in the ranks of a first launch.

Leaves warm ranks open at its end.
"""

import sys

torch_was_loaded = "torch" in sys.modules

from echelon.launching import Ranks, launch  # noqa: E402


def had_torch() -> bool:
    return torch_was_loaded


if __name__ == "__main__":
    print(torch_was_loaded, launch(had_torch, 4))
    ranks = Ranks(2)
    ranks.run(had_torch)
