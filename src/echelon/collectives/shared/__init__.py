"""Ranks of one host pass CPU tensors through shared memory; see `docs/collectives.md`, "The transport".

An acceleration: only `echelon.collectives` knows of it, and `group_over` chooses it.

rendezvous       finds out whether all ranks of a group can share memory, and links them
handshake        connects two ranks: a socket, and each one's region for the other
slots, header    the memory: rings of slots, each written by one rank and read by others
operation_queue  operations as coroutines, one after the other
progress_loop    the thread that advances them: a caller that waits, or else a background thread
peer_socket      the notices from a peer
link             all of this, for one group
operations       what each operation does: a direct_read of the others' tensors, or a staged_copy
group            the Group over a link
"""
