"""What a pipeline over NCCL needs of a GPU: a stream for each communicator, and hardware queues for streams.

[Note: shared streams] A communicator runs on one stream of torch's pool, which hands out the same 32 streams
again and again, and a stream runs one operation after the other. Two communicators that share one are one
queue, in which a message that waits for its other end holds up what comes behind it. Hosts run ahead of their
devices. With two stages under 1f1b:

    rank 0    … SA1 RG0 B0 SA2     SA1 ends with rank 1's RA1
    rank 1    … SG0 RA1 F1 B1      SG0 ends with rank 0's RG0

If SA1 shares a stream with RG0 and SG0 with RA1, each receive waits for the send before it, and this for the
other receive. It is the same with a collective behind a send. So no two communicators of a rank may share a
stream. Those that are made in a row, as the groups and edges of a mesh are, have different ones as long as
they are no more than the pool has.

[Note: shared hardware queues] The streams of a GPU share CUDA_DEVICE_MAX_CONNECTIONS hardware queues. What is
at the head of a queue starts when its stream has come so far, and nothing behind it, of any stream, starts
before. With one queue, in a plan such as pipeline=1-2 schedule=naive microbatches=2: the first replica of the
last stage begins to sum its gradients, in two buckets, and then sends the gradient of its input. The second
sum starts when the first has ended, so the send behind it starts after the other replica has summed too. That
one waits for its activation, which the first stage computes after it has received that gradient.
"""

import os
from collections.abc import Collection, Iterable, Iterator

import torch
import torch.distributed as dist

from echelon.collectives import Group, RecordingGroup
from echelon.errors import raise_errors
from echelon.plan import Plan

NUM_STREAMS = 32  # of each priority in torch's pool
_DEFAULT_QUEUES = 8
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def check_streams(
    plan: Plan,
    groups: Iterable[Group],
    pairs: Collection[tuple[int, int]],
    pipeline: Group,
    everyone: Group,
    device: torch.device,
) -> None:
    """Refuse a pipeline whose messages could wait for each other; every rank must call this, and each raises.

    `groups` are those that this rank has already; `pairs` (sender, receiver), as `pipeline` numbers its
    ranks, are those that will have an edge.
    """
    extra = _num_message_streams()
    num_edges = sum(pipeline.rank in pair for pair in pairs)
    needed = num_edges * (1 + extra) + sum(_num_streams(group, extra) for group in groups)
    numbers = torch.tensor([needed, num_edges, -_hardware_queues()], device=device)
    everyone.all_reduce(numbers, "max")
    most, most_edges, fewest_queues = (abs(number) for number in numbers.tolist())
    raise_errors(f"plan '{plan}' over NCCL", list(_errors(most, most_edges, fewest_queues, extra)))


def _errors(num_streams: int, num_edges: int, queues: int, extra: int) -> Iterator[str]:
    if num_streams > NUM_STREAMS:
        unbound = " (and pass device_id to init_process_group: without it each takes two)" if extra else ""
        yield (
            f"communicators of one rank must not share a CUDA stream, and torch has {NUM_STREAMS}: one rank "
            f"needs {num_streams}, for messages to and from {num_edges // 2} ranks of neighbouring stages "
            f"and for its groups; use stages whose numbers of replicas differ less, or data= to replicate "
            f"the whole pipeline{unbound}"
        )
    if queues < _DEFAULT_QUEUES:
        yield (
            f"{_QUEUES} must be at least {_DEFAULT_QUEUES}, and a rank has {queues}: in so few hardware "
            f"queues an operation that waits for another rank holds up what that rank waits for; set it to "
            f"32 before CUDA starts, or unset it"
        )


def _num_streams(group: Group, extra: int) -> int:
    """Streams of a group that is not an edge: for its collectives, and for messages to two neighbours."""
    if isinstance(group, RecordingGroup) or group.size == 1:
        return 0
    return 1 + extra * min(group.size - 1, 2)


def _num_message_streams() -> int:
    """How many communicators of their own the messages between two ranks of a group have.

    One, unless the process group is bound to a device.
    """
    world = dist.group.WORLD
    return int(world is not None and world.bound_device_id is None)


def _hardware_queues() -> int:
    """How many hardware queues CUDA was asked for; it ignores what is no number from 1 to 32."""
    text = os.environ.get(_QUEUES, "")
    return int(text) if text.isdecimal() and 1 <= int(text) <= 32 else _DEFAULT_QUEUES
