"""Units that are used in the backward pass: what is on its way, what has memory, and what torch refuses.

The group is one whose operations take effect when they are waited for.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.collectives import Group, RecordingGroup
from echelon.nn.wrapping import Wrapping
from echelon.parallel.data.all_reduce import UnitAllReduce
from echelon.parallel.data.parameter_set import ShardGroups, SharedGradient
from echelon.parallel.data.sharing import Sharing, SummedUnit
from echelon.parallel.data.zero.zero import Zero
from tests.groups import DeferredGroup
from tests.sets import set_of

pytestmark = pytest.mark.usefixtures("packed")


def ones(layers: int = 5) -> nn.Sequential:
    """Layers of two features each, all weights 1."""
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(layers)))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model


def make_sharing(
    model: nn.Module, group: Group, level: int, shared: Sequence[SharedGradient] = (), *, waits: bool = True
) -> Sharing:
    parameter_set = set_of(model, group, shared_gradients=shared)
    if level == 0:
        return UnitAllReduce(parameter_set, waits=waits)
    return Zero(parameter_set, level, Wrapping(), in_backward=True, waits=waits)


def run_step(sharing: Sharing, model: nn.Module, *, microbatches: int = 1) -> None:
    sharing.start_step()
    for index in range(microbatches):
        total = model(torch.ones(1, 2)).sum()
        sharing.start_backward(last=index == microbatches - 1)
        total.backward()
        sharing.finish_backward()
    sharing.reduce()
    sharing.publish()


def gradient_bytes(sharing: Sharing) -> int:
    storages = {g.untyped_storage().data_ptr(): g.untyped_storage() for g in sharing.storages().gradients}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_units_are_used_in_turn_while_the_backward_pass_goes_on(level: int, microbatches: int) -> None:
    group, model = DeferredGroup(), ones()
    sharing = make_sharing(model, group, level)
    names: list[str] = []
    sizes: list[int] = []
    gradients: list[Tensor] = []

    def use(unit: SummedUnit) -> None:
        names.extend(local.name for local in unit.local)
        gradients.extend(local.tensor.grad.clone() for local in unit.local if local.tensor.grad is not None)
        sizes.append(gradient_bytes(sharing))
        assert sum(not storage.expired() for storage in group.reduced) <= 1, "that of the next unit"

    sharing.update_in_backward(use)
    used_when: list[int] = []
    model[0].register_forward_hook(
        lambda *arguments: arguments[2].register_hook(lambda _: used_when.append(len(names))) and None
    )
    for _ in range(2):
        names.clear()
        used_when.clear()
        gradients.clear()
        run_step(sharing, model, microbatches=microbatches)
        assert names == ["4.weight", "3.weight", "2.weight", "1.weight", "0.weight"]
        # The output's gradient of layer 0 comes when those of layers 4 to 1 are complete: of these the last
        # is on its way.
        assert used_when[-1] == 3
        rows = 1 if level else 2  # the part of rank 0 is one row
        for place, gradient in enumerate(gradients):
            count = 2 * microbatches * 2**4  # ranks, microbatches, paths through the other layers
            assert torch.equal(gradient.view(-1), torch.full((2 * rows,), float(count))), place
        assert gradient_bytes(sharing) == 0
        assert not group.pending
    whole, part = 2 * 2 * 4, (2 * 4 if level else 0)
    parts = 5 * part if level > 1 and microbatches > 1 else 2 * part
    if microbatches == 1:
        assert max(sizes) <= 2 * whole + parts, "one on its way, one complete"


@pytest.mark.parametrize("level", [0, 1])
def test_replicas_in_turn_do_not_wait_in_the_backward_pass(level: int) -> None:
    """They are in different ones: another rank's may come after this one."""
    group, model = DeferredGroup(), ones()
    sharing = make_sharing(model, group, level, waits=False)
    used: list[str] = []
    sharing.update_in_backward(lambda unit: used.extend(local.name for local in unit.local))
    sharing.start_step()
    sharing.start_backward(last=True)
    model(torch.ones(1, 2)).sum().backward()
    sharing.finish_backward()
    assert used == []
    sharing.reduce()
    assert len(used) == 5


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_gradient_that_other_ranks_share_waits_for_them(level: int) -> None:
    """In memory of its own: the unit's is freed."""
    model = ones(3)
    shared = SharedGradient(model[1].weight, RecordingGroup("tensor"))
    sharing = make_sharing(model, DeferredGroup(), level, [shared])
    used: list[str] = []
    sharing.update_in_backward(lambda unit: used.extend(local.name for local in unit.local))
    sharing.start_step()
    sharing.start_backward(last=True)
    model(torch.ones(1, 2)).sum().backward()
    sharing.finish_backward()
    sharing.reduce()
    assert used == ["2.weight", "0.weight"]
    kept = [local for local in sharing.local_parameters() if local.tensor.grad is not None]
    assert [local.name for local in kept] == ["1.weight"]
    assert gradient_bytes(sharing) == kept[0].tensor.numel() * 4
    sharing.publish()
    assert gradient_bytes(sharing) == 0


class Branches(nn.Module):
    """The second layer is used by nobody here."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))

    def layers(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[2](self.blocks[0](x))


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("group", [RecordingGroup("data"), DeferredGroup()], ids=["one", "two"])
def test_what_nobody_used_has_no_gradient(level: int, group: Group) -> None:
    if group.size == 1 and level:
        return  # one replica shards nothing
    model = Branches()
    sharing = make_sharing(model, group, level)
    used: list[str] = []
    sharing.update_in_backward(
        lambda unit: used.extend(e.name for e in unit.local if e.tensor.grad is not None)
    )
    for _ in range(2):
        used.clear()
        run_step(sharing, model)
        assert sorted(used) == ["blocks.0.weight", "blocks.2.weight"]


class Reads(nn.Module):
    """Its first layer multiplies by the weight of its last one, which torch does not know to be the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(2, 2, bias=False) for _ in range(3))

    def layers(self) -> list[nn.Module]:
        return [self.first, self.middle, self.last]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(F.linear(self.first(x), self.last.weight.detach())))


@pytest.mark.parametrize("level", [0, 1, 2])
def test_torch_refuses_a_weight_that_was_updated_and_is_needed_again(level: int) -> None:
    """Also where the optimizer updates memory that torch does not know to be the weight's."""
    model = Reads()
    sharing = make_sharing(model, DeferredGroup(), level)
    sharing.update_in_backward(lambda _: None)
    sharing.start_step()
    sharing.start_backward(last=True)
    total = model(torch.ones(1, 2)).sum()
    # When the middle layer is complete, the last one is used.
    with pytest.raises(RuntimeError, match=r"modified by an in-?place"):
        total.backward()


def test_parts_of_copies_are_summed_twice_before_they_are_used() -> None:
    """Hybrid sharding: over the ranks of a copy, then over copies."""
    shard, copies = DeferredGroup("shard"), DeferredGroup("copies")
    model = ones()
    everyone = RecordingGroup("data", size=4)
    parameter_set = set_of(model, everyone, shards=ShardGroups(shard, copies))
    sharing = Zero(parameter_set, 2, Wrapping(), in_backward=True)
    gradients: list[Tensor] = []
    sharing.update_in_backward(lambda unit: gradients.extend(e.tensor.grad.clone() for e in unit.local))  # type: ignore[union-attr]
    run_step(sharing, model)
    assert len(gradients) == 5
    assert all(torch.equal(gradient, torch.full((2,), 4.0 * 2**4)) for gradient in gradients)
