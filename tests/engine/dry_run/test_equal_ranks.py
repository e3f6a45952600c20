"""A world of equal ranks: what collectives make of this rank's tensors, and messages."""

import json

import pytest
import torch

from echelon.collectives import about_content
from echelon.collectives.mesh import Mesh, pretending, this_device
from echelon.engine.dry_run.dry_run import EqualMesh, EqualPipelines, EqualRanks, SilenceError
from echelon.plan import Plan


def group(rank: int = 1, size: int = 4) -> EqualRanks:
    return EqualRanks("data", rank, size)


def test_sums_are_those_of_equal_ranks() -> None:
    values = torch.tensor([1.0, 2.0])
    group().all_reduce(values)
    assert values.tolist() == [4, 8]
    group().all_reduce(values, "max")
    group().all_reduce(values, "mean")
    group().reduce(values, 0)
    assert values.tolist() == [16, 32]
    part = torch.empty(1)
    group(size=2).reduce_scatter(part, torch.tensor([3.0, 5.0]))
    assert part.tolist() == [10]


def test_every_rank_has_the_part_of_this_one() -> None:
    whole, part = torch.empty(4), torch.tensor([7.0])
    group().all_gather(whole, part)
    assert whole.tolist() == [7, 7, 7, 7]
    group().all_gather(whole, whole[1:2])  # a part may lie in the whole
    gathered = torch.empty(4)
    group().gather(part * 2, gathered, target=1)
    assert gathered.tolist() == [14, 14, 14, 14]
    group().scatter(part, source=0)
    assert part.tolist() == [0]


def test_every_rank_sends_what_this_one_sends_to_itself() -> None:
    output = torch.empty(4, dtype=torch.int64)
    group().all_to_all(output, torch.tensor([1, 2, 3, 4]))
    assert output.tolist() == [2, 2, 2, 2]
    received = torch.empty(3)
    group(size=3).all_to_all(received, torch.tensor([1.0, 2.0, 3.0]), [1, 1, 1], [1, 0, 2])
    assert received.tolist() == [0, 0, 0]  # and where it sends nothing, zeros


def test_ranks_without_a_loss_count_those_of_others() -> None:
    every, tally = group(), torch.tensor([0.0, 0.0, 0.0, 0.0])
    with every.ledger.about("metrics"):
        every.all_reduce(tally)
    assert tally.tolist() == [1, 1, 1, 0]


DESCRIPTION = json.dumps([["tensor", 0], [[[2, 3], "float32", True]]]).encode()


def receive(pipeline: EqualPipelines, size: int) -> bytes:
    memory = torch.empty(size, dtype=torch.uint8)
    with about_content("activation of microbatch 0 for stage 1"):
        pipeline.recv(memory, 0)
    return memory.numpy().tobytes()


def test_an_activation_is_described_and_then_there() -> None:
    pipeline = EqualPipelines("pipeline", 1, 2)
    pipeline.descriptions = {"activation of microbatch 0 for stage 1": DESCRIPTION}
    length = int.from_bytes(receive(pipeline, 8), "little")
    assert receive(pipeline, length) == DESCRIPTION
    message = receive(pipeline, 1024)
    assert message[:9] == bytes(8) + b"\x01"  # as described, and its tensor is there
    assert torch.frombuffer(bytearray(message[16:40]), dtype=torch.float64).round().tolist() == [1, 1, 1]
    with torch.no_grad():
        length = int.from_bytes(receive(pipeline, 8), "little")
        assert json.loads(receive(pipeline, length))[1] == [[[2, 3], "float32", False]]


def test_a_pipeline_without_descriptions_tells_what_was_sent() -> None:
    pipeline = EqualPipelines("pipeline", 0, 2)
    with about_content("activation of microbatch 0 for stage 1"):
        pipeline.send(torch.tensor([1, 2], dtype=torch.uint8), 1)
    handle = pipeline.recv(torch.empty(4, dtype=torch.uint8), 1, wait=False)
    assert pipeline.sent == {"activation of microbatch 0 for stage 1": [b"\x01\x02"]}
    with pytest.raises(SilenceError):
        handle.wait()


def test_a_mesh_is_pretended_where_one_would_be_joined() -> None:
    plan = Plan.parse("data=16 pipeline=4")
    with pretending(lambda plan: EqualMesh.pretend(plan, 33)):
        mesh = Mesh.join(plan)
        assert this_device() == torch.device("cpu")
    assert isinstance(mesh, EqualMesh)
    assert (mesh.messages.rank, mesh.messages.size, mesh.group("data").size) == (2, 4, 16)
    tied = mesh.group_of_stages([0, 2])
    assert (tied.axis, tied.rank, tied.size) == ("tied", 1, 2)
    assert mesh.group_of_stages([0, 3]).size == 1
    assert mesh.free_host_memory() is None
