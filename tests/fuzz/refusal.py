"""Trainings that are refused: on every rank, with the same words, and without the end of the ranks."""

import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch.distributed as dist

from echelon.errors import UserError
from echelon.launching import Ranks
from tests.warm_ranks import joined_meshes

_PATIENCE = 30.0  # seconds: of a machine that is busy
_NUMBERS = count()  # of refusals in this process, the same on all ranks


class Refusal(NamedTuple):
    text: str


def run_or_refuse(ranks: Ranks, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """As `ranks.run`; a UserError of all ranks is raised here, and leaves them as they are. That of some is
    an error: the others would have trained."""
    results = ranks.run(partial(_refused, fn), *args)
    refusals = [result.text for result in results if isinstance(result, Refusal)]
    if len(refusals) == len(results):
        raise UserError(refusals[0])
    assert not refusals, f"{len(refusals)} of {len(results)} ranks refuse: {refusals[0]}"
    return results


def _refused(fn: Callable[..., Any], *args: Any) -> Any:
    with joined_meshes() as meshes:
        try:
            return fn(*args)
        except UserError as refusal:
            text = str(refusal)
    if dist.is_initialized():
        _wait_for_all(text)  # no rank closes what another still uses
    for mesh in meshes:
        mesh.close()
    return Refusal(text)


def _wait_for_all(text: str) -> None:
    """Return when all ranks refuse; others that train on would wait for this one."""
    store, key = dist.distributed_c10d._get_default_store(), f"refused {next(_NUMBERS)}"
    store.add(key, 1)
    end = time.monotonic() + _PATIENCE
    while store.add(key, 0) < dist.get_world_size():
        assert time.monotonic() < end, f"rank {dist.get_rank()} refuses, and others do not: {text}"
        time.sleep(0.05)
