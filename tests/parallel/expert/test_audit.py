"""The audit compares models whose experts are on several ranks with one device."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from echelon import parallelize
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.models import cross_entropy
from echelon.parallel.expert import modules
from tests.cases import adamw
from tests.nn.experts.models import make_model
from tests.parallel.expert.models import plain_gate, tokens

Warm = Callable[[int], Ranks]


def audits(plan: str) -> list[tuple[str, str]]:
    model = make_model(plain_gate)
    with parallelize(model, plan, optimizer=adamw, loss=cross_entropy) as engine:
        engine.step(engine.local(tokens(0)))
        return [(result.name, result.outcome) for result in engine.audit]


def test_gradients_hold(warm_ranks: Warm) -> None:
    (found, *others) = warm_ranks(2).run(audits, "data=2 expert=2")
    assert dict(found) == {"finite weights": "held", "gradients": "held"}
    assert others == [found]


def swapped(rows: Tensor, weights: Tensor, slots: object) -> Tensor:
    """Tokens get what was computed for others."""
    return mix_rows(rows.flip(0), weights, slots)  # type: ignore[arg-type]


mix_rows = modules.mix_rows


def refusal_with_a_bug(plan: str) -> str:
    modules.mix_rows = swapped
    try:
        audits(plan)
    except UserError as error:
        return str(error)
    finally:
        modules.mix_rows = mix_rows
    return ""


class Squared(nn.Module):
    """Experts whose output is not linear in the weights of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up_proj = nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        chosen = self.up_proj[top_k_index]  # [tokens, k, width, width]
        computed = torch.einsum("tw,tkwv->tkv", hidden_states, chosen)
        return (computed * top_k_weights[..., None] ** 2).sum(1)


def refusal_of_squares(plan: str) -> str:
    model = make_model(plain_gate)
    for block in model.blocks:
        block.mlp.experts = Squared()
    try:
        with parallelize(model, plan, optimizer=adamw, loss=cross_entropy) as engine:
            engine.step(engine.local(tokens(0)))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("refusal", [refusal_with_a_bug, refusal_of_squares])
def test_what_experts_compute_otherwise_is_found(warm_ranks: Warm, refusal: Callable[[str], str]) -> None:
    for message in warm_ranks(2).run(refusal, "data=2 expert=2"):
        assert "step 1 would not train as on one device" in message
        assert "gradients differ from head.projection.weight backward" in message
