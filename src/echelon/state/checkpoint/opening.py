"""A checkpoint opened by all ranks together: whole, and the same on each, before anything is changed."""

from pathlib import Path

import torch.distributed as dist

from echelon.collectives.agreement import check_on_every_rank, decide_on_rank_0
from echelon.errors import UserError
from echelon.state.checkpoint.saved import SavedState


def open_whole(path: str | Path, *, verify: bool = True) -> SavedState:
    """The checkpoint in a folder, with all hashes compared; every rank must call this.

    Each file is hashed by one rank. What any rank finds is raised on all of them. `verify=False`: sizes and
    the manifest only.
    """
    if not dist.is_initialized():
        saved = SavedState.open(path)
        if verify:
            saved.verify()
        return saved
    opened: list[SavedState] = []

    def open_first() -> str:
        opened.append(SavedState.open(path))
        return opened[0].fingerprint

    def compare(expected: str) -> None:
        if not opened:
            opened.append(SavedState.open(path))
        if opened[0].fingerprint != expected:
            raise UserError(
                f"{path}: rank {dist.get_rank()} finds another checkpoint there than rank 0; the folder must "
                "be the same for all ranks, on a shared disk"
            )
        if verify:
            opened[0].verify(dist.get_rank(), dist.get_world_size())

    fingerprint = str(decide_on_rank_0(open_first))
    check_on_every_rank(lambda: compare(fingerprint))
    return opened[0]
