"""One storage: stored, dropped, fetched and given back."""

import pytest
import torch
from torch import Tensor

from echelon.collectives import Ledger
from echelon.collectives.boundary import PretendedBoundary
from echelon.memory.activation_offload.offloaded_storage import (
    HostPool,
    OffloadedStorage,
    SavedVersion,
    SharedPiece,
    StepStream,
    View,
)

CPU = torch.device("cpu")


def storage_of(tensor: Tensor) -> tuple[OffloadedStorage, PretendedBoundary, HostPool]:
    boundary = PretendedBoundary(Ledger())
    pool = HostPool(boundary, lambda: None)
    return OffloadedStorage(tensor, 0, boundary, StepStream(CPU), None), boundary, pool


def test_a_storage_is_stored_dropped_fetched_and_released() -> None:
    tensor = torch.arange(2048, dtype=torch.uint8)
    storage, _, pool = storage_of(tensor)
    storage.num_users = 2
    piece = pool.take(4096)
    assert piece is not None
    shared = SharedPiece(pool, piece)
    assert (storage.num_bytes, storage.is_here, storage.is_stored) == (2048, True, False)
    storage.drop()
    assert storage.is_here, "there is no other copy"
    version = SavedVersion(tensor)
    storage.versions.append(version)
    storage.store(shared, 512)
    assert (storage.is_here, storage.is_stored) == (True, True)
    storage.drop()
    assert (storage.is_here, storage.versions, version._tensor) == (False, [], None)
    assert torch.equal(piece[512 : 512 + 2048], tensor)
    assert torch.equal(storage.value(), tensor)
    assert storage.value().data_ptr() != tensor.data_ptr()
    storage.drop()
    assert not storage.is_here
    storage.end_use()
    assert pool.take(4096) is not piece, "another saved tensor needs it"
    assert torch.equal(storage.value(), tensor)
    storage.end_use()
    assert (storage.is_here, pool.take(4096) is piece) == (False, True)


def test_a_piece_goes_back_when_its_last_storage_is_gone() -> None:
    _, _, pool = storage_of(torch.zeros(1))
    piece = pool.take(4096)
    assert piece is not None
    shared = SharedPiece(pool, piece)
    shared.acquire()
    shared.acquire()
    shared.release()
    assert not any(pool._idle.values())
    shared.release()
    assert pool.take(4096) is piece


def test_a_saved_version_remembers_changes_before_the_copy() -> None:
    for changes_first in (False, True):
        tensor = torch.ones(2)
        version = SavedVersion(tensor)
        version.check()
        if changes_first:
            tensor.add_(1)
        version.finish()
        tensor.add_(1)
        if changes_first:
            with pytest.raises(Exception, match="was changed in place after the forward pass had saved it"):
                version.check()
        else:
            version.check()


def test_a_view_of_another_memory() -> None:
    base = torch.arange(24.0)
    view = base.view(4, 6)[1:, ::2].t()
    other = (base + 100).clone()
    taken = View.of(view).take(other)
    assert (taken.shape, taken.stride(), taken.storage_offset()) == (view.shape, view.stride(), 6)
    assert torch.equal(taken, view + 100)
