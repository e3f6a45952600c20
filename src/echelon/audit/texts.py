"""What a rank has found, told to all ranks: an error of one is raised by every one, in the same words."""

import torch
from torch import Tensor

from echelon.collectives import Group

SUBJECT = "checks"  # of the ledger


def first_text(text: str, group: Group, device: torch.device) -> str:
    """The first text of the ranks of `group` that is not empty; all of them call this together."""
    own = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    with group.ledger.about(SUBJECT):
        lengths = gather_rows(torch.tensor([len(own)], device=device), group).flatten().tolist()
        if not any(lengths):
            return ""
        padded = own.new_zeros(max(lengths))
        padded[: len(own)] = own
        rows = gather_rows(padded, group)
    speaker = next(rank for rank, length in enumerate(lengths) if length)
    return bytes(rows[speaker, : lengths[speaker]].tolist()).decode()


def gather_rows(local: Tensor, group: Group) -> Tensor:
    """Every rank's numbers, [ranks, …]."""
    gathered = local.new_empty(group.size, *local.shape)
    with group.ledger.about(SUBJECT):
        group.all_gather(gathered, local.contiguous())
    return gathered
