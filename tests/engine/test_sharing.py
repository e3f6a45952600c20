"""Parameter sets of a stage: several of them, each over ranks of its own, train as one device does."""

from collections.abc import Callable, Collection, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn

import echelon
from echelon.collectives import Group, group_over
from echelon.collectives.mesh import Mesh
from echelon.engine import sharing
from echelon.launching import Ranks
from echelon.parallel.data.parameter_set import ParameterSet, SharedGradient, named_subset
from echelon.parallel.data.zero.units import divide_units
from echelon.verify.reference import train_on_one_device
from tests.cases import adamw, mean_loss, vectors
from tests.contract_models import CASES

RANKS = 4

Tensors = dict[str, torch.Tensor]


def _group(name: str, all_ranks: Sequence[Sequence[int]], mesh: Mesh) -> Group:
    """This rank's group among `all_ranks`, which every rank makes in the same order."""
    made = {tuple(ranks): dist.new_group(list(ranks)) for ranks in all_ranks}
    own = next(group for ranks, group in made.items() if mesh.rank in ranks)
    assert isinstance(own, dist.ProcessGroup)
    return group_over(name, own, mesh.ledger)


def two_sets(
    module: nn.Module,
    mesh: Mesh,
    shared_gradients: Sequence[SharedGradient],
    tied: Collection[nn.Parameter],
    norm_elsewhere: Collection[nn.Parameter],
    smallest_unit: int,
) -> list[ParameterSet]:
    """Every second parameter over all ranks; the others over pairs, whose sums are summed across pairs."""
    assert not shared_gradients
    assert not tied
    assert not norm_elsewhere
    parameters = list(dict.fromkeys(module.parameters()))
    over_all, over_pairs = set(parameters[::2]), set(parameters[1::2])
    pair = _group("pair", [(0, 1), (2, 3)], mesh)
    across = _group("across", [(0, 2), (1, 3)], mesh)
    shared = [
        SharedGradient(parameter, across, counts_norm=mesh.rank in (0, 1))
        for parameter in parameters
        if parameter in over_pairs and parameter.requires_grad
    ]
    return [
        ParameterSet(
            "over all",
            named_subset(module, over_all),
            mesh.group("weights"),
            divide_units(module, smallest_unit, only=over_all),
        ),
        ParameterSet(
            "over pairs",
            named_subset(module, over_pairs),
            pair,
            divide_units(module, smallest_unit, only=over_pairs),
            shared,
        ),
    ]


def train(
    plan: str, name: str
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]], list[float], str]:
    case, one_set = CASES[name], sharing.parameter_sets
    sharing.parameter_sets = two_sets
    try:
        engine = echelon.parallelize(
            case.build(dist.get_rank()),
            plan,
            optimizer=adamw,
            loss=case.loss,
            clip=case.clip,
            smallest_unit=0,
        )
    finally:
        sharing.parameter_sets = one_set
    with engine:
        norms = [engine.step(engine.local(batch)).grad_norm for batch in case.batches()]
        return engine.full_state_dict(), engine.full_optimizer_state(), norms, repr(engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "name"),
    [
        *((level, "gpt") for level in range(4)),
        (1, "twice"),
        *(pytest.param(level, "twice", marks=pytest.mark.slow) for level in (0, 2, 3)),
    ],
)
def test_two_sets_over_different_groups_are_equal_to_one_device(
    warm_ranks: Callable[[int], Ranks], level: int, name: str
) -> None:
    case = CASES[name]
    plan = f"data={RANKS} zero={level} microbatches=2 precision=fp64"
    reference = train_on_one_device(case)
    for weights, state, norms, text in warm_ranks(RANKS).run(train, plan, name):
        assert norms == pytest.approx(reference.grad_norms, abs=1e-9)
        for key, value in reference.weights.items():
            assert float((weights[key] - value).abs().max()) <= 1e-9, key
        for key, parts in reference.optimizer.items():
            assert state[key].keys() == parts.keys()
            for part, value in parts.items():
                assert float((state[key][part] - value).abs().max()) <= 1e-9, (key, part)
        assert "over all" in text
        assert f"parameters over pair (2), {'Zero' if level else 'AllReduce'}" in text


class Choosing(nn.Module):
    """Each rank's samples go one of two ways, so that ranks use different parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 5)
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        ways = [way(x[chosen]) for way, chosen in self._ways(x) if chosen.any()]
        return self.last(torch.tanh(torch.cat(ways)))  # type: ignore[no-any-return]

    def _ways(self, x: torch.Tensor) -> list[tuple[nn.Module, torch.Tensor]]:
        to_left = torch.arange(len(x)) >= (len(x) if dist.get_rank() % 2 else 0)
        return [(self.left, to_left), (self.right, ~to_left)]


def same_group(
    module: nn.Module, mesh: Mesh, _: object, __: object, ___: object, smallest_unit: int
) -> list[ParameterSet]:
    """Two sets over the same ranks, each with one of the two ways."""
    chosen = {p for name, p in module.named_parameters() if name.startswith(("left", "first"))}
    others = set(module.parameters()) - chosen
    return [
        ParameterSet(
            name,
            named_subset(module, only),
            mesh.group("weights"),
            divide_units(module, smallest_unit, only=only),
        )
        for name, only in (("one", chosen), ("other", others))
    ]


def losses_of(plan: str, two: bool) -> list[float]:
    one_set = sharing.parameter_sets
    if two:
        sharing.parameter_sets = same_group  # type: ignore[assignment]
    try:
        torch.manual_seed(0)
        engine = echelon.parallelize(
            Choosing(), plan, optimizer=adamw, loss=mean_loss, smallest_unit=0, audit="off"
        )
    finally:
        sharing.parameter_sets = one_set
    with engine:
        return [engine.step(engine.local(vectors(step))).loss for step in range(4)]


@pytest.mark.slow_cases("1", "2")
@pytest.mark.parametrize("level", [0, 1, 2])
def test_sets_are_reduced_in_one_order_whichever_parameters_a_rank_uses(
    warm_ranks: Callable[[int], Ranks], level: int
) -> None:
    """Messages of two sets met each other, without an error, where ranks used different parameters."""
    plan = f"data=2 zero={level} microbatches=2 precision=fp64"
    one, two = (warm_ranks(2).run(losses_of, plan, several)[0] for several in (False, True))
    assert two == pytest.approx(one, abs=1e-12)
