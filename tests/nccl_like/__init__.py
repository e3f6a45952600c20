"""A Group that orders operations as NCCL does, between threads of one process on the CPU.

    queue       All operations of a rank on one communicator (sends, receives, collectives, over all peers)
                run in one queue, in the order in which they were issued. If the world has few `streams`,
                communicators of a rank that take the same one share a queue.
    send        completes only together with its receive, when both are at the head of their queues. NCCL
                may buffer a small message, which only hides a deadlock until a message is larger.
    collective  completes when it is at the head of every member's queue.
    making      of a communicator is a collective too, for which the host waits: in `world.group`, or, if the
                world is `lazy`, in `connect` or the first operation of each member (as torch does it).

[Note: waiting] NCCL's `wait` does not block the host, it makes the compute stream wait. Here the thread of a
rank is its compute stream, so `wait` blocks the thread. Both have the same dependencies. A GPU operation
starts when (1) all compute that was issued before it is done, and with it all waits that were issued before,
and (2) its predecessors in its queue are done. The host may issue more while its stream waits. By (1) that
depends on the same waits, so it starts no earlier for being issued earlier: each deadlocks if the other does.

Where the host itself waits (a message in host memory, the making of a communicator, a read of device memory),
a thread here also waits for all that its stream waits for. So this finds every deadlock, and may find one
where a host that runs ahead of its stream would escape. It cannot show a host that reads device memory before
the stream is there, nor kernels of two communicators that do not fit on a GPU together.
"""

from tests.nccl_like.communicator import Mismatch
from tests.nccl_like.group import NcclLikeGroup
from tests.nccl_like.mesh import NcclMesh
from tests.nccl_like.rank_threads import Deadlock
from tests.nccl_like.world import NcclWorld

__all__ = ["Deadlock", "Mismatch", "NcclLikeGroup", "NcclMesh", "NcclWorld"]
