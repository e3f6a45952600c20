import gc
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from echelon.launching.messages.transport import pack, unpack

TENSORS = {
    "float64": torch.randn(3, 4, dtype=torch.float64),
    "bfloat16": torch.randn(5).bfloat16(),
    "float8": torch.randn(4).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.arange(7),
    "complex": torch.randn(3, dtype=torch.complex64),
    "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    "0-dim": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "strided": torch.arange(20.0)[1::3],
    "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_as_it_was(name: str) -> None:
    sent = TENSORS[name]
    received = unpack(pack({"inside": [sent]}))["inside"][0]
    assert type(received) is torch.Tensor
    assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
    assert torch.equal(received.to(torch.complex128), sent.to(torch.complex128))


def test_a_tensor_that_arrived_can_be_written() -> None:
    received = unpack(pack(torch.zeros(4)))
    received += 1  # pytest turns a warning about read-only memory into an error
    assert received.sum() == 4


@pytest.mark.parametrize("requires_grad", [True, False])
def test_gradients_stay_required(requires_grad: bool) -> None:
    tensor = torch.ones(2, requires_grad=requires_grad)
    parameter = nn.Parameter(torch.ones(2), requires_grad=requires_grad)
    assert unpack(pack(tensor)).requires_grad is requires_grad
    received = unpack(pack(parameter))
    assert type(received) is nn.Parameter
    assert received.requires_grad is requires_grad


def test_a_result_of_autograd_arrives_as_a_leaf() -> None:
    received = unpack(pack(torch.ones(2, requires_grad=True) * 3))
    assert received.is_leaf
    assert received.tolist() == [3.0, 3.0]


def test_a_whole_module_arrives() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    received = unpack(pack(model))
    inputs = torch.randn(4, 3)
    assert torch.equal(received.eval()(inputs), model.eval()(inputs))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 warns when it rebuilds one
def test_a_sparse_tensor_arrives() -> None:
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(unpack(pack(sparse)).to_dense(), torch.eye(3))


def test_a_meta_tensor_stays_meta() -> None:
    assert unpack(pack(torch.empty(2, device="meta"))).is_meta


def test_no_file_descriptor_is_sent() -> None:
    """Garbage of earlier tests may close descriptors meanwhile, so only new ones count."""
    folder = Path("/proc/self/fd") if Path("/proc/self/fd").exists() else Path("/dev/fd")
    gc.collect()
    before = set(os.listdir(folder))
    tensors = [unpack(pack(torch.ones(3))) for _ in range(200)]
    assert set(os.listdir(folder)) - before == set()
    assert len(tensors) == 200


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_tensor_comes_to_the_cpu() -> None:
    received = unpack(pack(torch.ones(2, device="cuda")))
    assert received.device.type == "cpu"
