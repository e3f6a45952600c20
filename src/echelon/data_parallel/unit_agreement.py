"""Whether all ranks of a set have the same units, asked once, before they gather and reduce them together.

Over NCCL, ranks that disagree on the size of a message wait forever, or get each other's memory. So each rank
describes its units in text. Two numbers of it are compared; the texts move only where these differ.
"""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch

from echelon.collectives import Group
from echelon.data_parallel.parameter_set import Unit
from echelon.errors import UserError


def check_same_units(units: Sequence[Unit], prefetch: int, group: Group, device: torch.device) -> None:
    """Raise, on every rank of the group, unless all have these units and gather as many ahead."""
    text = "\n".join([f"prefetch={prefetch}", *_lines(units)]).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())
    with group.ledger.about("agreement"):
        extremes = torch.tensor([len(text), digest, -len(text), -digest], device=device)
        group.all_reduce(extremes, "max")
        longest, largest_digest, shortest, smallest_digest = extremes.tolist()
        if (longest, largest_digest) != (-shortest, -smallest_digest):
            _raise_difference(_gather(text, longest, group, device), group.axis)


def _lines(units: Sequence[Unit]) -> Iterator[str]:
    for unit in units:
        place = f"unit '{unit.name}'" if unit.name else "the unit of the model itself"
        if not unit.parameters:
            yield f"nothing in {place}"
        for name, parameter in unit.parameters:
            frozen = "" if parameter.requires_grad else ", frozen,"
            yield f"{name} of shape {tuple(parameter.shape)} and type {parameter.dtype}{frozen} in {place}"


def _gather(text: bytes, longest: int, group: Group, device: torch.device) -> list[list[str]]:
    """The lines of every rank."""
    padded = torch.tensor(list(text.ljust(longest, b"\0")), dtype=torch.uint8, device=device)
    gathered = padded.new_empty(group.size, longest)
    group.all_gather(gathered, padded)
    return [bytes(row).rstrip(b"\0").decode().splitlines() for row in gathered.tolist()]


def _raise_difference(lines: Sequence[list[str]], axis: str) -> None:
    rank = next(rank for rank, own in enumerate(lines) if own != lines[0])
    pairs = zip_longest(lines[0], lines[rank], fillvalue="nothing more")
    first, other = next(pair for pair in pairs if pair[0] != pair[1])
    raise UserError(
        f"ranks 0 and {rank} along {axis} have different units of parameters, and with zero=1 or more ranks "
        f"gather and reduce units together: rank 0 has {first}, and rank {rank} has {other}; give "
        "parallelize the same model, smallest_unit and prefetch on every rank"
    )
