"""Which experts a rank keeps, how it tells of them, and what is refused."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from echelon import deferred, parallelize
from echelon.collectives import RecordingGroup
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.models import cross_entropy
from echelon.nn.experts import Experts, gates_of
from echelon.nn.sequence import View
from echelon.nn.wrapping import Wrapping, find_wrapper
from echelon.parallel.expert.modules import SpreadExperts, experts_of
from echelon.parallel.expert.split import spread_experts
from echelon.parallel.layer_sharding import SharedPositions
from tests.cases import adamw
from tests.nn.experts.models import make_model
from tests.parallel.expert.models import plain_gate, tokens, transformers_model

Warm = Callable[[int], Ranks]


def spread(model: nn.Module, rank: int = 1, ranks: int = 2) -> nn.Module:
    spread_experts(model, RecordingGroup("expert", rank, ranks), Wrapping())
    return model


def test_a_rank_keeps_its_slice_of_every_stacked_matrix() -> None:
    whole = Experts(6, 4, 8)
    model = nn.ModuleDict({"experts": Experts(6, 4, 8), "other": nn.Linear(2, 2)})
    model["experts"].load_state_dict(whole.state_dict())
    model["experts"].down_proj.requires_grad_(False)
    model["experts"].gate_up_proj.no_decay = True
    spread(model, 1, 3)
    kept = model["experts"]
    assert torch.equal(kept.gate_up_proj, whole.gate_up_proj[2:4])
    assert torch.equal(kept.down_proj, whole.down_proj[2:4])
    assert not kept.down_proj.requires_grad
    assert kept.gate_up_proj.no_decay
    assert kept.num_experts == 2
    assert experts_of(model) == list(kept.parameters())


def test_a_copy_talks_to_the_same_ranks() -> None:
    group = RecordingGroup("expert", 1, 2)
    model = make_model()
    spread_experts(model, group, Wrapping())
    for gate in gates_of(model):
        gate.positions = SharedPositions(torch.arange, group, None, View())
    copied = copy.deepcopy(model)
    for block, original in zip(copied.blocks, model.blocks, strict=True):
        experts = find_wrapper(block.mlp.experts, SpreadExperts)
        assert experts is not None
        assert experts.module is block.mlp.experts
        assert experts.group is group
        assert block.mlp.gate.positions is original.mlp.gate.positions
        assert block.mlp.experts.down_proj is not original.mlp.experts.down_proj


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_experts_of_transformers_are_known(kind: str) -> None:
    model = spread(transformers_model(kind))
    assert {len(parameter) for parameter in experts_of(model)} == {2}


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


class WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 3
        self.up_proj = nn.Parameter(torch.randn(3, 2, 2))
        self.dropout, self.extra = nn.Dropout(0.1), nn.Linear(2, 2)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden_states * top_k_index * top_k_weights


def test_all_that_cannot_be_spread_is_refused_at_once() -> None:
    with pytest.raises(UserError) as caught:
        spread(nn.ModuleDict({"a": WithDropout(), "b": Listed()}))
    listed, uneven, inside, dropout = caught.value.errors
    assert listed.startswith("b.experts: a list of single experts cannot be spread over ranks")
    assert uneven == ("a: 3 experts are not divisible by expert=2; use an expert that divides 3 (1, 3)")
    assert "parameters in modules inside" in inside
    assert "has dropout inside" in dropout


class Reading(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def test_weights_that_others_use_or_watch_are_refused() -> None:
    experts = Experts(4, 4, 8)
    experts.down_proj.register_hook(lambda gradient: gradient * 2)
    model = nn.ModuleDict({"experts": experts, "reading": Reading(experts.gate_up_proj)})
    with pytest.raises(UserError) as caught:
        spread(model)
    hooked, shared = caught.value.errors
    assert hooked.startswith("experts.down_proj: has a hook on its gradient")
    assert shared.startswith("reading: it has weights of experts too")


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(UserError, match=r"Linear has no experts that ranks can share out.*; drop expert"):
        spread(nn.Linear(2, 2))


def test_a_second_engine_is_refused() -> None:
    model = spread(nn.Sequential(Experts(4, 4, 8)))
    with pytest.raises(UserError, match="another engine has spread its experts already"):
        spread(model)


def _seeded() -> nn.Module:
    torch.manual_seed(0)
    return make_model(plain_gate)


def closed_state(plan: str) -> tuple[bool, str]:
    """Whether a closed engine leaves the whole model, and how the engine is printed."""
    model = _seeded()
    engine = parallelize(model, plan, optimizer=adamw, loss=cross_entropy)
    engine.step(engine.local(tokens(0)))
    whole, printed = engine.full_state_dict(), repr(engine)
    engine.close()
    state = model.state_dict()
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    is_whole = all(torch.equal(state[name], tensor) for name, tensor in whole.items())
    return is_whole and all(module.num_experts == 4 for module in experts), printed


def test_a_closed_engine_leaves_the_whole_model(warm_ranks: Warm) -> None:
    for is_whole, printed in warm_ranks(4).run(closed_state, "data=4 expert=2 zero=1"):
        assert is_whole
        assert "experts 4,608 parameters over expert_data (2), Zero" in printed
        assert "over data (4), Zero" in printed
        assert "expert ×2" in printed


def start_weights(plans: tuple[str, ...]) -> list[dict[str, Tensor]]:
    started = []
    for plan in plans:
        with parallelize(deferred(_seeded), plan, optimizer=adamw, loss=cross_entropy) as engine:
            started.append(engine.full_state_dict())
            engine.step(engine.local(tokens(0)))
    return started


def test_deferred_models_start_with_the_same_weights(warm_ranks: Warm) -> None:
    (alone,) = start_weights(("data=1",))
    plans = ("data=2 expert=2", "data=2 expert=2 zero=3")
    for started in warm_ranks(2).run(start_weights, plans):
        for weights in started:
            assert all(torch.equal(weights[name], weight) for name, weight in alone.items())
