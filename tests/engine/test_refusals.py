"""Plans that would not be equal to one device: refused with the mend, or mended. Each was accepted once.

Most need no ranks: `Within` splits a model for a rank of a mesh that is only pretended.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import echelon
from echelon.engine.within import Within
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.mesh import Mesh
from echelon.models import ModelConfig, build, cross_entropy
from echelon.plan import Plan
from echelon.tensor_parallel import Table
from echelon.verify import Case, assert_equal
from tests.cases import adamw
from tests.contract_models import token_loss
from tests.tensor_parallel.models import SEQUENCE, VOCAB, tokens

Warm = Callable[[int], Ranks]


def within(model: nn.Module, plan: str, loss: Any = cross_entropy, table: Table | None = None) -> Within:
    return Within(model, Mesh.pretend(Plan.parse(plan), 0), loss, table)


def gpt(**changes: Any) -> nn.Module:
    return build(ModelConfig("gpt", 2, 16, 4, vocab=VOCAB, sequence=SEQUENCE, **changes))


# Logits that are not split.

WHOLE_LOGITS = {"head.projection": "replicated"}


@pytest.mark.usefixtures("warm_contract")
@pytest.mark.parametrize("loss", [cross_entropy, token_loss])
def test_logits_that_are_whole_have_the_loss_of_one_device(loss: Any) -> None:
    """Their parts on two ranks were taken for parts of the vocabulary: the loss was off by log 2."""
    assert_equal(Case(gpt, tokens, loss, adamw, steps=3, options={"table": WHOLE_LOGITS}), "tensor=2")


def test_only_split_logits_have_a_loss_over_parts() -> None:
    assert within(gpt(), "tensor=2", table=WHOLE_LOGITS).loss is cross_entropy
    assert within(gpt(), "tensor=2").loss is not cross_entropy
    assert within(gpt(), "tensor=2", token_loss).loss is token_loss
