"""Groups are made with as many creations on 4,096 ranks as on 8, and every rank takes part in every split."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from echelon.collectives import TorchGroup, process_groups
from echelon.collectives.mesh import Layout, Mesh
from echelon.collectives.process_groups import new_host_group, new_process_group
from echelon.errors import UserError
from echelon.plan import Plan
from echelon.program import build
from tests.nccl_like import NcclMesh, NcclWorld

NO_COLOUR = ()  # the group of a rank that takes part in a split without a colour


class Creations(NamedTuple):
    """What one rank has made."""

    groups: list[tuple[int, ...]]  # in order; NO_COLOUR where it only took part
    names: list[str]
    count: int  # torch's own, which names the next group


@contextmanager
def pretended_world(rank: int, ranks: int, *, bound: bool = False) -> Iterator[Creations]:
    """This process as one rank of a world in which nothing moves; `bound` is one over NCCL that splits."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    create, groups, names = c10d._new_process_group_helper, [], []

    def counted(size: int, number: int, members: list[int], backend: str, *args: Any, **kwargs: Any) -> Any:
        groups.append(tuple(members))
        names.append(args[1])
        return create(size, number, members, dist.Backend("fake"), *args, **kwargs)

    class Source:
        def perform_nocolor_split(self, device: torch.device) -> None:
            assert device == torch.device("cuda", 0)
            groups.append(NO_COLOUR)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c10d, "_new_process_group_helper", counted)
        if bound:
            world = dist.group.WORLD
            assert world is not None
            world.bound_device_id = torch.device("cuda", 0)
            patch.setattr(process_groups, "backend_for", lambda _: "nccl")
            patch.setattr(c10d, "_get_split_source", lambda _: Source())
        try:
            yield Creations(groups, names, 0)
        finally:
            dist.destroy_process_group()


def creations(text: str, rank: int, *, bound: bool) -> Creations:
    """What a rank of a plan makes for its mesh, for tied weights and for the messages of a pipeline."""
    plan = Plan.parse(text)
    with pretended_world(rank, plan.ranks, bound=bound) as made, pytest.MonkeyPatch.context() as patch:
        mesh = Mesh.join(plan)
        if plan.stages > 1:
            mesh.group_of_stages({0, plan.stages - 1})
            patch.setattr(TorchGroup, "has_queue_per_peer", lambda *_: False)
            patch.setattr(TorchGroup, "connect", lambda *_: None)
            last = mesh.group("pipeline").size - 1
            mesh.edges({(0, last), (last, 0), (last - 1, last)})
        mesh.close()
        assert len(c10d._world.pg_map) == 1, "the world alone is left"
        return made._replace(count=c10d._world.group_count)


@pytest.mark.quick_cases(3)
@pytest.mark.slow_cases("data={} context=2 pipeline=2-True", "data={} tensor=2 pipeline=2-True")
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "data={} tensor=2 pipeline=2",
        "data={} context=2 tensor=2",
        "data={} context=2 pipeline=2",
        "data={} expert=2 tensor=2",
        "data={} pipeline=3-1",
    ],
)
def test_4096_ranks_make_as_many_groups_as_8(text: str, *, bound: bool) -> None:
    """Every rank made every group: 4,096 ranks made thousands."""
    data = 4 if "expert" in text else 2
    few, many = text.format(data), text.format(512 * data)
    for rank_of_8, rank_of_4096 in ((0, 0), (7, 4095)):
        small = creations(few, rank_of_8, bound=bound)
        large = creations(many, rank_of_4096, bound=bound)
        assert len(small.groups) == len(large.groups) < 12
        assert small.count == large.count


def test_a_rank_looks_at_its_own_groups_alone_unless_they_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a list of all ranks")

    monkeypatch.setattr(Layout, "groups", refuse)
    monkeypatch.setattr(Layout, "columns", refuse)
    monkeypatch.setattr(Layout, "positions", property(refuse))
    assert len(creations("data=256 tensor=8 pipeline=8", 16383, bound=False).groups) > 4


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("text", ["data=2 tensor=2 pipeline=2", "pipeline=2-1-1 data=2", "pipeline=3-1"])
def test_members_have_one_name_for_a_group_and_no_two_groups_share_it(text: str, *, bound: bool) -> None:
    named: dict[str, set[tuple[int, ...]]] = {}
    members: Counter[str] = Counter()
    counts = set()
    for rank in range(Plan.parse(text).ranks):
        made = creations(text, rank, bound=bound)
        counts.add(made.count)
        for name, group in zip(made.names, filter(None, made.groups), strict=True):
            named.setdefault(name, set()).add(group)
            members[name] += 1
    assert len(counts) == 1, "a later group has the same name on every rank"
    for name, groups in named.items():
        (group,) = groups
        assert members[name] == len(group)


def splits(groups: Sequence[Sequence[int]], ranks: int) -> list[list[tuple[int, ...]]]:
    """For each split, the group with whose colour each rank takes part."""
    made = []
    for rank in range(ranks):
        own = next((group for group in groups if rank in group), groups[0])
        with pretended_world(rank, ranks, bound=True) as creations:
            process_group = new_process_group(own, lambda: groups)
        assert (process_group is None) == (rank not in own)
        made.append(creations.groups)
    return [list(split) for split in zip(*made, strict=True)]


def test_every_rank_takes_part_in_a_split() -> None:
    assert splits([(0, 2), (3, 1)], 5) == [[(0, 2), (1, 3), (0, 2), (1, 3), NO_COLOUR]]


def test_a_rank_that_is_alone_makes_no_group_and_takes_part_in_the_split_of_others() -> None:
    """It had a communicator of its own, with memory on the device."""
    groups = [(0, 1), (2,), (3,)]
    for bound in (False, True):
        made = []
        for rank in range(4):
            own = next(group for group in groups if rank in group)
            with pretended_world(rank, 4, bound=bound) as creations:
                assert (new_process_group(own, lambda: groups) is None) == (len(own) == 1)
                made.append((creations.groups, c10d._world.group_count))
        alone = [NO_COLOUR] if bound else []
        counts = {count for _, count in made}
        assert [ranks for ranks, _ in made] == [[(0, 1)], [(0, 1)], alone, alone]
        assert len(counts) == 1, "a later group has the same name on every rank"


def test_ranks_that_are_all_alone_split_nothing() -> None:
    with pretended_world(1, 2, bound=True) as made:
        assert new_process_group([1], lambda: [[0], [1]]) is None
    assert made.groups == []


def test_groups_with_the_same_colour_are_split_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c10d, "_process_group_color", lambda ranks: 5 if ranks[0] == 0 else 8)
    assert splits([(0, 1), (2, 3), (4, 5)], 7) == [
        [(0, 1), (0, 1), (2, 3), (2, 3), NO_COLOUR, NO_COLOUR, NO_COLOUR],
        [NO_COLOUR, NO_COLOUR, NO_COLOUR, NO_COLOUR, (4, 5), (4, 5), NO_COLOUR],
    ]


def test_a_group_of_the_host_is_not_split() -> None:
    with pretended_world(1, 4, bound=True) as made:
        group = new_host_group([3, 1])
        assert (group.rank(), dist.get_process_group_ranks(group)) == (0, [1, 3])
    assert made.groups == [(1, 3)]


def test_colours_of_a_layout_differ_as_a_rule() -> None:
    """So one split is enough; torch's hash is the same in every process."""
    layout = Layout(Plan.parse("data=64 tensor=8 pipeline=8"))
    for axis in ("data", "tensor", "pipeline"):
        _, num_splits = process_groups._find_split([0], layout.groups(axis))
        assert num_splits == 1


def errors_of_ranks(text: str) -> list[str]:
    """What each rank is told when the edges of a plan are made over a group like NCCL; "" if nothing."""
    plan = Plan.parse(text)
    pairs = build(plan.schedule, plan.replicas, plan.microbatches).pairs
    world = NcclWorld(plan.ranks)

    def told(rank: int) -> str:
        mesh = NcclMesh(world, plan, rank)
        try:
            mesh.edges(pairs)
        except UserError as error:
            return str(error)
        return ""

    return world.run(told)


def bind(monkeypatch: pytest.MonkeyPatch, device: torch.device | None) -> None:
    """As if torch.distributed were initialised, for `device` or without one."""
    world = SimpleNamespace(bound_device_id=device)
    monkeypatch.setattr(process_groups, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=world)))


# Streams.


@pytest.mark.parametrize("plan", ["pipeline=3-1 microbatches=3", "pipeline=15-1 microbatches=15"])
def test_as_many_communicators_as_there_are_streams(plan: str) -> None:
    """The last rank of the second plan has 30 edges, and a group of all ranks."""
    assert set(errors_of_ranks(plan)) == {""}


def test_more_communicators_than_streams_are_refused() -> None:
    errors = errors_of_ranks("pipeline=16-1 microbatches=16")
    assert len(errors) == 17
    assert len(set(errors)) == 1
    assert "torch has 32: one rank needs 33, for messages to and from 16 ranks" in errors[0]
    assert "data= to replicate the whole pipeline" in errors[0]


def test_groups_that_are_not_bound_to_a_device_take_two_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    bind(monkeypatch, torch.device("cuda", 0))
    assert set(errors_of_ranks("pipeline=8-1 microbatches=8")) == {""}
    bind(monkeypatch, None)
    assert set(errors_of_ranks("pipeline=6-1 microbatches=6")) == {""}
    (error,) = set(errors_of_ranks("pipeline=8-1 microbatches=8"))
    assert "one rank needs 35, for messages to and from 8 ranks" in error
    assert "pass device_id to init_process_group" in error


# Hardware queues.


@pytest.mark.parametrize("queues", ["1", "7"])
def test_few_hardware_queues_are_refused(monkeypatch: pytest.MonkeyPatch, queues: str) -> None:
    """Megatron wants one of them; a message that waits would hold up what its sender waits for."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    first, second = errors_of_ranks("pipeline=2")
    assert first == second
    assert f"CUDA_DEVICE_MAX_CONNECTIONS must be at least 8, and a rank has {queues}" in first
    assert "set it to 32 before CUDA starts, or unset it" in first


@pytest.mark.parametrize("queues", ["", "8", "32", "all"])
def test_enough_hardware_queues(monkeypatch: pytest.MonkeyPatch, queues: str) -> None:
    """CUDA ignores what is no number, and has 8 then."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    assert errors_of_ranks("pipeline=2") == ["", ""]


def test_one_rank_with_few_queues_is_refused_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    queues = iter([32, 1, 32])
    monkeypatch.setattr(process_groups, "_hardware_queues", lambda: next(queues))
    assert all("a rank has 1" in error for error in errors_of_ranks("pipeline=3"))
