"""Prints, as JSON: what ranks with a device each, and one rank more, do with them; whether CUDA runs here."""

import json

import torch
import torch.distributed as dist

from echelon.launching import launch


def use_the_device() -> tuple[str, int, list[float]]:
    """The backend, the device that is current, and a sum made on it."""
    total = torch.ones(3, device="cuda")
    dist.all_reduce(total)
    dist.barrier()
    return dist.get_backend(), torch.cuda.current_device(), total.tolist()


if __name__ == "__main__":
    devices = torch.cuda.device_count()
    alone, together = (launch(use_the_device, ranks) for ranks in (devices, devices + 1))
    print(json.dumps([alone, together, torch.cuda.is_initialized()]))
