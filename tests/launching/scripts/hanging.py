"""A rank of torchrun that does not do what the others do. argv: the way, see WAYS."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from echelon import parallelize
from echelon.collectives import Group, Ledger, TorchGroup
from echelon.launching import beat, join

LATE = 1  # the rank that is not like the others


def is_late() -> bool:
    return dist.get_rank() == LATE


def world() -> Group:
    assert dist.group.WORLD is not None
    return TorchGroup("data", dist.group.WORLD, Ledger())


def sleep_before_a_collective() -> None:
    group = world()
    group.all_reduce(torch.ones(4))
    if is_late():
        time.sleep(600)
    group.all_reduce(torch.ones(4))


def take_another_branch() -> None:
    group = world()
    group.all_reduce(torch.ones(4))
    if is_late():
        group.barrier()
    else:
        group.all_reduce(torch.ones(4))
    group.all_reduce(torch.ones(4))


def raise_an_error() -> None:
    if is_late():
        raise ValueError("the learning rate went for a walk")
    world().recv(torch.ones(4), LATE)


def raise_on_all_ranks() -> None:
    raise ValueError("all ranks see that the batch is empty")


def die() -> None:
    if is_late():
        os.kill(os.getpid(), signal.SIGKILL)
    world().recv(torch.ones(4), LATE)


def end_early() -> None:
    if not is_late():
        world().recv(torch.ones(4), LATE)


def work_slowly() -> None:
    """Longer than the deadline: with signs of life while the others wait, then without while none does."""
    group = world()
    if is_late():
        for _ in range(40):
            time.sleep(0.1)
            beat()
    group.all_reduce(torch.ones(4))
    time.sleep(4.0)
    print(f"rank {dist.get_rank()} is done", flush=True)


class Sleepy(nn.Linear):
    """Sleeps in its third forward pass, which is in the second step."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += torch.is_grad_enabled()
        if self.calls == 5:
            time.sleep(600)
        return super().forward(x)


def sleep_in_a_pipeline() -> None:
    layers = [nn.Linear(4, 4) if rank == 1 - LATE else Sleepy(4, 4) for rank in range(2)]
    engine = parallelize(
        nn.Sequential(*layers),
        "pipeline=2 microbatches=4",
        optimizer=torch.optim.SGD,
        loss=nn.functional.mse_loss,
        audit="off",
    )
    for _ in range(3):
        engine.step((torch.ones(8, 4), torch.zeros(8, 4)))


WAYS = {
    way.__name__: way
    for way in (
        sleep_before_a_collective,
        take_another_branch,
        raise_an_error,
        raise_on_all_ranks,
        die,
        end_early,
        work_slowly,
        sleep_in_a_pipeline,
    )
}

if __name__ == "__main__":
    join()
    WAYS[sys.argv[1]]()
