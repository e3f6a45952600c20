"""The mesh over real processes, and pretended."""

import itertools
import os
import signal
import time
import timeit
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from echelon.collectives import Edge, Group, RecordingGroup, TorchGroup, disjoint_pairs, edges_over
from echelon.collectives.mesh import Layout, Mesh, this_device
from echelon.errors import UserError
from echelon.launching import PeerLost, RankFailed, Ranks
from echelon.plan import Plan


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("ring", [False, True])
def test_sets_are_disjoint_complete_and_few(ranks: int, ring: bool) -> None:
    neighbours = [(rank, rank + 1) for rank in range(ranks - 1)] + [(ranks - 1, 0)] * ring
    pairs = {way for a, b in neighbours for way in ((a, b), (b, a))}
    sets = disjoint_pairs(pairs)
    assert sorted(pair for each in sets for pair in each) == sorted(pairs)
    for each in sets:
        members = [rank for pair in each for rank in pair]
        assert len(members) == len(set(members))
    assert len(sets) <= 6, "whatever the number of ranks"


def test_all_pairs_of_many_replicas_are_found() -> None:
    pairs = list(itertools.permutations(range(5), 2))
    assert sorted(pair for each in disjoint_pairs(pairs) for pair in each) == sorted(pairs)


def test_one_group_serves_all_edges_and_tensors_of_a_device_have_their_heads_on_the_host() -> None:
    group = RecordingGroup("pipeline", 1, 3)
    on_cpu = edges_over(group, torch.device("cpu"))
    assert on_cpu.outgoing == on_cpu.incoming == {0: Edge(group, 0), 2: Edge(group, 2)}
    on_gpu = edges_over(group, torch.device("cuda"))
    assert on_gpu.outgoing == {0: Edge(group, 0, Edge(group, 0)), 2: Edge(group, 2, Edge(group, 2))}


def members(text: str) -> dict[str, list[int]]:
    """The ranks along each axis, as they answer."""
    mesh = Mesh.join(Plan.parse(text))
    answers = {}
    for axis in mesh.axes:
        group = mesh.group(axis)
        ranks = torch.empty(group.size, dtype=torch.int64)
        group.all_gather(ranks, torch.tensor([mesh.rank]))
        answers[axis] = ranks.tolist()
        assert ranks[group.rank] == mesh.rank
    mesh.close()
    return answers


@pytest.mark.parametrize(
    "text",
    [
        "data=2 tensor=2",
        "pipeline=2 data=2",
        "pipeline=3-1",
        "pipeline=2-1-1",
        "data=4 expert=2",
        "data=4 zero=1 shard=2",
    ],
)
def test_groups_hold_the_ranks_of_the_layout(warm_ranks: Callable[[int], Ranks], text: str) -> None:
    layout = Layout(Plan.parse(text))
    for rank, answers in enumerate(warm_ranks(4).run(members, text)):
        assert answers == {axis: list(layout.group(axis, rank)) for axis in answers}


def test_one_process_alone_is_a_mesh_of_one() -> None:
    mesh = Mesh.join(Plan())
    assert (mesh.rank, mesh.group("data").size, mesh.group("tensor").size) == (0, 1, 1)


def test_a_plan_for_more_ranks_than_there_are_is_refused() -> None:
    with pytest.raises(UserError, match=r"needs 4 ranks, but 1 is running.*ranks=4"):
        Mesh.join(Plan(data=4))


def test_a_pretended_mesh_stands_anywhere() -> None:
    mesh = Mesh.pretend(Plan(data=64, tensor=8, pipeline=8), rank=4095)
    assert mesh.position[:4] == (7, 63, 0, 7)
    mesh.group("tensor").all_reduce(torch.ones(8))
    assert mesh.ledger.total("tensor").sent == 2 * 7 * 4


def test_sharding_groups_are_those_of_another_axis_where_they_hold_the_same_ranks() -> None:
    """A communicator costs memory and a stream: none is made twice."""
    hybrid = Mesh.pretend(Plan.parse("data=8 zero=1 shard=4"), rank=6)
    assert (hybrid.group("shard").axis, hybrid.group("shard").size) == ("shard", 4)
    assert (hybrid.group("copies").axis, hybrid.group("copies").size) == ("copies", 2)
    assert (hybrid.group("shard").rank, hybrid.group("copies").rank) == (2, 1)
    plain = Mesh.pretend(Plan.parse("data=8 zero=1"), rank=6)
    assert plain.group("shard") is plain.group("weights")
    assert plain.group("copies").size == 1
    by_context = Mesh.pretend(Plan.parse("data=2 context=4 zero=1 shard=4"), rank=6)
    assert by_context.group("shard") is by_context.group("context")
    assert by_context.group("copies") is by_context.group("data")


def cost_of_pretending(text: str) -> tuple[float, int]:
    """The seconds and the most bytes that the last rank of a plan takes to know its groups."""
    plan = Plan.parse(text)

    def pretend() -> None:
        mesh = Mesh.pretend(plan, plan.ranks - 1)
        assert mesh.group("all").size == plan.ranks
        assert mesh.position.data == plan.data - 1

    seconds = min(timeit.repeat(pretend, timer=time.process_time, number=1, repeat=10))
    tracemalloc.start()
    pretend()
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return seconds, most_bytes


def test_a_pretended_mesh_of_16384_ranks_costs_as_much_as_one_of_64() -> None:
    """Tables over all ranks made it 1.2 s and 7 MB: 300 times as much."""
    few_seconds, few_bytes = cost_of_pretending("data=2 tensor=8 pipeline=4 zero=1 shard=2")
    many_seconds, many_bytes = cost_of_pretending("data=512 tensor=8 pipeline=4 zero=1 shard=8")
    assert many_seconds < 10 * few_seconds
    assert many_bytes < 2 * few_bytes


def fails_to_join() -> int:
    """How many process groups torch has after the second creation failed; another mesh works after that."""
    create, calls = c10d._new_process_group_helper, itertools.count()

    def create_or_fail(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 1:
            raise RuntimeError("no descriptor left")
        return create(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c10d, "_new_process_group_helper", create_or_fail)
        with pytest.raises(RuntimeError, match="no descriptor left"):
            Mesh.join(Plan.parse("data=2 tensor=2"))
    left = len(c10d._world.pg_map)
    mesh = Mesh.join(Plan.parse("data=2 tensor=2"))
    use(mesh)
    mesh.close()
    return left


def test_a_creation_that_fails_leaves_no_group_behind(warm_ranks: Callable[[int], Ranks]) -> None:
    assert warm_ranks(4).run(fails_to_join) == [1] * 4, "the world alone"


def joins_with_unknown_transport() -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ECHELON_TRANSPORT", "pigeon")
        with pytest.raises(UserError, match="ECHELON_TRANSPORT=pigeon"):
            Mesh.join(Plan(data=2))
    return len(c10d._world.pg_map)


def test_ranks_that_cannot_be_linked_leave_no_group_behind(warm_ranks: Callable[[int], Ranks]) -> None:
    assert warm_ranks(2).run(joins_with_unknown_transport) == [1, 1], "the world alone"


class Resources(NamedTuple):
    """What a process holds of the system."""

    threads: int
    descriptors: int
    shared_memory: int

    @classmethod
    def now(cls) -> "Resources":
        maps = Path("/proc/self/maps").read_text().splitlines()
        shared = [line for line in maps if "memfd:" in line or "/dev/shm" in line]
        return cls(len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), len(shared))


def use(mesh: Mesh) -> None:
    """Something of every kind over every group: staged, read directly, and through the backend."""
    for axis in mesh.axes:
        group = mesh.group(axis)
        for length in (3, 100_000):
            group.all_reduce(torch.ones(length))
        group.broadcast(torch.ones(3), wait=False).wait()
        group.barrier()
    mesh.group_of_stages([0]).all_reduce(torch.ones(3))


def makes_and_closes(text: str, count: int) -> tuple[Resources, Resources, Resources]:
    """What this process holds while the first mesh is open, after it, and after all of them."""
    for number in range(count):
        mesh = Mesh.join(Plan.parse(text))
        use(mesh)
        if number == 0:
            during = Resources.now()
        mesh.close()
        mesh.close()  # again is harmless
        if number == 0:
            after_first = Resources.now()
    return during, after_first, Resources.now()


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "text", [pytest.param("data=2 tensor=2", marks=pytest.mark.slow), "pipeline=2 data=2"]
)
def test_closed_meshes_leave_nothing_behind(text: str, count: int) -> None:
    """3,700 idle threads were seen where meshes were made one after the other and never closed."""
    with Ranks(4, deadline=300.0) as ranks:
        results = ranks.run(makes_and_closes, text, count)
    for during, after_first, after_all in results:
        assert all(held > left for held, left in zip(during, after_first, strict=True)), (
            "else this sees nothing"
        )
        assert all(left <= first for left, first in zip(after_all, after_first, strict=True))


def uses_a_closed_mesh() -> None:
    first = Mesh.join(Plan(data=2))
    second = Mesh.join(Plan(data=2))
    first.close()
    with pytest.raises(RuntimeError, match="all_reduce along data: the group is closed"):
        first.group("data").all_reduce(torch.ones(3))
    use(second)  # does not depend on the first
    second.close()
    dist.barrier()  # the world belongs to the launcher


def test_a_closed_mesh_is_refused_and_others_go_on(warm_ranks: Callable[[int], Ranks]) -> None:
    warm_ranks(2).run(uses_a_closed_mesh)


def closes_beside_the_dead(transport: str) -> None:
    os.environ["ECHELON_TRANSPORT"] = transport
    before = Resources.now()
    mesh = Mesh.join(Plan(data=3))
    use(mesh)
    if mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost):
        mesh.group("data").all_reduce(torch.ones(3))
    begun = time.monotonic()
    mesh.close()
    mesh.close()
    in_time = time.monotonic() - begun < 10
    nothing_left = all(after <= held for after, held in zip(Resources.now(), before, strict=True))
    raise PeerLost(f"closed in time: {in_time}, nothing left: {nothing_left}")


@pytest.mark.slow_cases("auto")
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_mesh_closes_when_a_peer_is_dead(transport: str) -> None:
    with pytest.raises(RankFailed) as caught, Ranks(3, deadline=60.0) as ranks:
        ranks.run(closes_beside_the_dead, transport)
    assert caught.value.rank == 1
    assert "SIGKILL" in caught.value.reason
    reports = [other for other in caught.value.others if "closed in time" in other]
    assert reports, caught.value.others
    assert all("closed in time: True, nothing left: True" in report for report in reports), reports


def closes_while_another_waits() -> str:
    """Rank 1 closes its mesh. Rank 0, which waits for it, learns that and can close too."""
    mesh = Mesh.join(Plan(data=2))
    group = mesh.group("data")
    message = ""
    if mesh.rank == 0:
        with pytest.raises(PeerLost) as caught:
            group.recv(torch.ones(3), 1)
        message = str(caught.value)
    mesh.close()
    dist.barrier()
    return message


def test_a_rank_that_closes_first_is_lost_to_those_who_wait(warm_ranks: Callable[[int], Ranks]) -> None:
    assert "lost a peer: rank 1 is gone" in warm_ranks(2).run(closes_while_another_waits)[0]


def test_a_pretended_mesh_can_be_closed() -> None:
    mesh = Mesh.pretend(Plan(data=2), rank=0)
    mesh.close()
    with pytest.raises(RuntimeError, match="the group is closed"):
        mesh.group("data").all_reduce(torch.ones(3))


def edges_like_nccl() -> tuple[dict[int, int], dict[int, int], list[float]]:
    """On three ranks, as if a wait did not block the host: each rank's edges, by the number of their group;
    and what it received when all sent at once, in an order that one queue for all peers could not serve."""
    mesh = Mesh.join(Plan.parse("pipeline=3"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(mesh.group("pipeline")), "has_queue_per_peer", lambda *_: False)
        edges = mesh.edges({(0, 1), (1, 0), (1, 2), (2, 1)})
    numbers: dict[Group, int] = {}
    groups = [
        {peer: numbers.setdefault(edge.group, len(numbers)) for peer, edge in way.items()}
        for way in (edges.outgoing, edges.incoming)
    ]
    received = []
    pending = [(torch.empty(1), edge) for _, edge in sorted(edges.incoming.items(), reverse=True)]
    receives = [(memory, edge.recv(memory, "test")) for memory, edge in pending]
    sends = [edge.send(torch.tensor([float(mesh.rank)]), "test") for edge in edges.outgoing.values()]
    for memory, handle in receives:
        handle.wait()
        received.append(memory.item())
    for handle in sends:
        handle.wait()
    mesh.close()
    return groups[0], groups[1], received


def test_edges_have_a_group_for_each_direction_where_one_queue_serves_all_peers(
    warm_ranks: Callable[[int], Ranks],
) -> None:
    results = warm_ranks(3).run(edges_like_nccl)
    assert [sorted(outgoing) for outgoing, _, _ in results] == [[1], [0, 2], [1]]
    assert [sorted(incoming) for _, incoming, _ in results] == [[1], [0, 2], [1]]
    for outgoing, incoming, _ in results:
        used = [*outgoing.values(), *incoming.values()]
        assert len(used) == len(set(used)), "no two edges share a group"
    assert [received for _, _, received in results] == [[1.0], [2.0, 0.0], [1.0]]


def connected_groups() -> list[str]:
    """The axes whose groups were connected, in order, for a pipeline whose edges have groups of their own."""
    connected: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchGroup, "connect", lambda group, _: connected.append(group.axis))
        mesh = Mesh.join(Plan.parse("pipeline=2"))
        patch.setattr(type(mesh.group("pipeline")), "has_queue_per_peer", lambda *_: False)
        mesh.edges({(0, 1), (1, 0)})
        mesh.group_of_stages([0, 1])
    mesh.close()
    return connected


def test_every_group_is_connected_when_it_is_made_in_the_same_order(
    warm_ranks: Callable[[int], Ranks],
) -> None:
    first, second = warm_ranks(2).run(connected_groups)
    assert first == second
    assert first == ["pipeline", "pipeline", "pipeline", "tied"], "the axis, an edge each way, tied weights"


def test_the_device_is_a_gpu_only_if_the_group_moves_gpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert this_device() == torch.device("cuda", 1), "one process alone"
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for backend, device in (("nccl", "cuda"), ("gloo", "cuda"), (None, "cpu")):
        monkeypatch.setattr("echelon.collectives.mesh.backend_for", lambda *_, backend=backend: backend)
        assert this_device().type == device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("echelon.collectives.mesh.backend_for", lambda *_: "gloo")
    assert this_device() == torch.device("cpu")
