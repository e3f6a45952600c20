import functools
import gc
import os
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn

from echelon.errors import UserError
from echelon.launching import RankFailed, Ranks, channel, is_launched_rank, send_message
from echelon.launching.channel import pack, pack_call, unpack
from tests.launching import tasks

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


def test_outside_a_rank_nothing_is_sent() -> None:
    assert not is_launched_rank()
    send_message("nobody listens")


def test_messages_arrive_in_order_while_the_run_waits() -> None:
    received: dict[int, list[tuple[int, float]]] = defaultdict(list)
    with Ranks(2) as ranks:
        ranks.run(
            tasks.send_counts,
            50,
            on_message=lambda rank, content: received[rank].append((content[0], content[1].item())),
        )
    assert received == {rank: [(step, float(step)) for step in range(50)] for rank in range(2)}


def test_messages_without_a_listener_are_dropped() -> None:
    with Ranks(1) as ranks:
        assert ranks.run(tasks.send_counts, 3) == [3]


def test_what_a_rank_says_after_another_has_failed_is_heard() -> None:
    received = []
    with Ranks(2) as ranks, pytest.raises(RankFailed, match="rank 1"):
        ranks.run(tasks.fail_after_a_message, (0.1, 0.0), on_message=lambda *event: received.append(event))
    assert sorted(received) == [(0, 0), (1, 1)]


def test_threads_of_a_rank_do_not_mix_their_messages() -> None:
    received = []
    with Ranks(1) as ranks:
        ranks.run(tasks.send_from_threads, 4, 50, on_message=lambda *event: received.append(event))
    assert sorted(received) == [(0, (thread, word)) for thread in range(4) for word in range(50)]


def test_a_forked_data_worker_does_not_send_in_the_name_of_its_rank() -> None:
    received = []
    with Ranks(1) as ranks:
        results = ranks.run(tasks.send_from_a_fork, on_message=lambda *event: received.append(event))
    assert results == [(0, True)]
    assert received == []


def test_a_function_of_a_module_is_packed_with_its_arguments() -> None:
    assert unpack(pack_call(tasks.echo, (1, "two"))) == (tasks.echo, (1, "two"))


def test_every_part_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(UserError) as caught:
        pack_call(lambda: 0, (1, threading.Lock(), tasks.NotForSending()))
    function, lock, stubborn = caught.value.errors
    assert "<lambda>" in function
    assert "top level of a module" in function
    assert "argument 1 of type lock" in lock
    assert "argument 2 of type NotForSending" in stubborn
    assert "I cannot be sent" in stubborn


def test_a_local_function_is_refused() -> None:
    def local() -> None:
        pass

    with pytest.raises(UserError, match="local cannot be sent"):
        pack_call(local, ())


@pytest.mark.parametrize("wrap", [lambda fn: fn, functools.partial])
def test_a_function_of_an_interactive_session_is_refused(wrap, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    main = type(sys)("__main__")
    main.work = tasks.nothing  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(tasks.nothing, "__module__", "__main__")
    with pytest.raises(UserError, match="interactive session"):
        pack_call(wrap(tasks.nothing), ())


def test_a_program_from_standard_input_is_refused() -> None:
    program = "from echelon.launching import launch\nlaunch(print, 2)\n"
    done = subprocess.run([sys.executable, "-"], input=program, text=True, capture_output=True, check=False)
    assert "UserError: The ranks import the main module" in done.stderr
    assert "<stdin>" in done.stderr


def test_arguments_are_packed_only_once_when_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = []
    monkeypatch.setattr(channel, "pack", lambda value: packed.append(value) or b"")
    pack_call(tasks.echo, (1,))
    assert packed == [(tasks.echo, (1,))]
