"""Which storage a tensor lies in, and what of it the tensor uses."""

import torch
from torch import nn

from echelon.memory.storages import address_of, is_dense, overlap, storages_of, weight_storages


def test_views_share_an_address_and_sparse_tensors_have_none() -> None:
    base = torch.arange(24.0)
    assert address_of(base[3:]) == address_of(base) != address_of(base.clone())
    assert storages_of([base, base[1:], torch.eye(2).to_sparse()]) == {address_of(base)}


def test_weights_are_parameters_and_buffers_as_they_are_now() -> None:
    norm = nn.BatchNorm1d(2, affine=False)
    model = nn.Sequential(nn.Linear(2, 2), norm)
    held = [*model.parameters(), *model.buffers()]
    assert weight_storages(model.modules()) == {address_of(tensor) for tensor in held}
    norm.running_mean = torch.ones(2)
    assert address_of(norm.running_mean) in weight_storages(model.modules())


def test_tensors_without_gaps() -> None:
    base = torch.arange(24.0).view(2, 3, 4)
    assert is_dense(base)
    assert is_dense(base.permute(2, 0, 1))
    assert not is_dense(base[:, :2])
    assert not is_dense(base[..., ::2])
    assert is_dense(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))


def test_tensors_of_one_storage_overlap_or_not() -> None:
    base = torch.arange(24.0)
    assert overlap(base[:5], base[4:])
    assert not overlap(base[:4], base[4:])
    assert overlap(base[::8], base[15:16]), "as far as their ends tell"
    assert not overlap(base[:0], base)
