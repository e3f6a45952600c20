"""Whether all ranks of a group describe what they have by the same text, asked once, before they use it.

Over NCCL, ranks that disagree on the size of a message wait forever, or get each other's memory. Two numbers
of the text are compared; the texts move only where these differ.
"""

import hashlib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch

from echelon.collectives import Group
from echelon.errors import UserError


class Difference(NamedTuple):
    """The first line that differs between rank 0 and `rank`, as each has it."""

    rank: int
    first: str
    other: str


def check_same_text(
    lines: Sequence[str], group: Group, device: torch.device, message: Callable[[Difference], str]
) -> None:
    """Raise a UserError with `message`, on every rank of the group, unless all have these lines."""
    text = "\n".join(lines).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())
    with group.ledger.about("agreement"):
        extremes = torch.tensor([len(text), digest, -len(text), -digest], device=device)
        group.all_reduce(extremes, "max")
        longest, largest_digest, shortest, smallest_digest = extremes.tolist()
        if (longest, largest_digest) != (-shortest, -smallest_digest):
            gathered = [each.splitlines() for each in _gather(text, longest, group, device)]
            raise UserError(message(_difference(gathered)))


def gather_texts(text: str, group: Group, device: torch.device) -> list[str]:
    """The texts of all ranks of the group, in rank order."""
    with group.ledger.about("agreement"):
        longest = torch.tensor(len(text.encode()), device=device)
        group.all_reduce(longest, "max")
        return _gather(text.encode(), int(longest), group, device)


def _gather(text: bytes, longest: int, group: Group, device: torch.device) -> list[str]:
    padded = torch.tensor(list(text.ljust(longest, b"\0")), dtype=torch.uint8, device=device)
    gathered = padded.new_empty(group.size, longest)
    group.all_gather(gathered, padded)
    return [bytes(row).rstrip(b"\0").decode() for row in gathered.tolist()]


def _difference(lines: Sequence[list[str]]) -> Difference:
    rank = next(rank for rank, own in enumerate(lines) if own != lines[0])
    pairs = zip_longest(lines[0], lines[rank], fillvalue="nothing more")
    return Difference(rank, *next(pair for pair in pairs if pair[0] != pair[1]))
