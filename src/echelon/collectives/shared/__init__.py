"""Ranks of one host that pass CPU tensors through shared memory; see `docs/collectives.md`, The transport.

meeting   finds out whether all ranks of a group are on this host, and connects them
slots     the memory: rings of slots, each written by one rank and read by others
lines     operations as coroutines, one after the other
drive     who makes them go on: callers that wait, or else a helper thread
speaker   the words from the peers that wake it
link      all of this, for one group
steps     what each operation does, slot by slot
group     the Group over all this
"""

from echelon.collectives.shared.group import SharedGroup, group_over

__all__ = ["SharedGroup", "group_over"]
