"""Runs among the ranks of torchrun. argv: how many there are, and a folder for each rank's results."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from echelon.launching import RemoteResult, launch


def work(scale: float) -> tuple[int, str, torch.Tensor]:
    total = torch.tensor([scale * (dist.get_rank() + 1)])
    dist.all_reduce(total)
    network = os.readlink("/proc/self/ns/net") if sys.platform == "linux" else ""
    return dist.get_rank(), network, total.repeat(dist.get_rank() + 1)


if __name__ == "__main__":
    ranks, folder = int(sys.argv[1]), Path(sys.argv[2])
    first = launch(work, ranks, 1.0)
    second = launch(work, ranks, 10.0)
    had = [
        {rank: result for rank, result in enumerate(results) if not isinstance(result, RemoteResult)}
        for results in (first, second)
    ]
    torch.save(had, folder / f"results-{os.environ['RANK']}.pt")
