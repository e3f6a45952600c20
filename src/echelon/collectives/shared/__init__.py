"""Ranks of one host that pass CPU tensors through shared memory; see `docs/collectives.md`, The transport.

meeting   finds out whether all ranks of a group are on this host, and connects them
slots     the memory: rings of slots, each written by one rank and read by others
link      the thread that moves: operations as coroutines, woken by words from the peers
steps     what each operation does, slot by slot
group     the Group over all this
"""

from echelon.collectives.shared.group import SharedGroup, group_over

__all__ = ["SharedGroup", "group_over"]
