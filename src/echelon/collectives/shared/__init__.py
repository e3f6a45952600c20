"""Ranks of one host pass CPU tensors through shared memory; see `docs/collectives.md`, "The transport".

An acceleration: only `echelon.collectives` knows of it, and `group_over` chooses it.

link             all of what follows, for one group; finds out whether its ranks can share memory
peers            connects two ranks: a socket for notices, and each one's region for the other
slots            the memory: of tensors, and rings of slots, each written by one rank and read by others
operation_queue  operations as coroutines, one after the other
progress_loop    the thread that advances them: a caller that waits, or else a background thread
group            the Group over a link; each operation is a direct_read or a staged_copy
"""
