"""Models of transformers, as they are, with their layers split over ranks."""

from typing import Any

import pytest
from torch import nn

from echelon.huggingface import FAMILIES, TENSOR_TABLES
from echelon.tensor_parallel.styles import Styles
from echelon.verify import assert_equal
from tests.huggingface.models import KINDS, case, make

pytestmark = pytest.mark.usefixtures("warm_contract")

# The table splits a vocabulary that ranks divide.
VOCABULARY = {"vocab_size": 32}
WIDE_WINDOWS = {"mistral": {"sliding_window": None}, "qwen2": {"use_sliding_window": False}}


def prove(kind: str, plan: str, steps: int) -> None:
    changes = VOCABULARY | (WIDE_WINDOWS.get(kind, {}) if "context" in plan else {})
    verdict = assert_equal(case(kind, steps, **changes), plan)
    print(f"{verdict.worst[1]:.1e} {kind} {verdict.plan}")


@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        ("pipeline=2", "llama"),
        ("tensor=2", "gpt2"),
        pytest.param("tensor=2", "llama", marks=pytest.mark.slow),
        pytest.param("pipeline=2", "gpt2", marks=pytest.mark.slow),
        pytest.param("data=2 zero=1", "llama", marks=pytest.mark.slow),
        pytest.param("data=2 zero=1", "gpt2", marks=pytest.mark.slow),
    ],
)
def test_each_axis_alone(kind: str, plan: str) -> None:
    prove(kind, plan, steps=20)


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.slow), "gpt2"])
def test_all_axes_together(kind: str) -> None:
    prove(kind, "data=2 tensor=2 pipeline=2 zero=1 sequence=true microbatches=2", steps=6)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral", "mixtral"])
def test_the_other_families(kind: str) -> None:
    prove(kind, "tensor=2 sequence=true", steps=4)


def test_every_family_has_a_table_and_every_line_fits_one_of_its_models() -> None:
    assert TENSOR_TABLES.keys() == FAMILIES.keys()
    models = [make(kind) for kind in KINDS]
    for table in TENSOR_TABLES.values():
        classes = {name for name, other in TENSOR_TABLES.items() if other is table}
        unused = [
            {pattern for pattern, _ in Styles(model, table).unused()}
            for model in models
            if type(model).__name__ in classes
        ]
        assert set.intersection(*unused) == set()


def checkpointing(kind: str, **changes: Any) -> nn.Module:
    model = make(kind, **changes)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_layers_that_are_computed_again(kind: str) -> None:
    """Their columns were computed together in one of the two passes, and one by one in the other."""
    assert_equal(case(kind, 4, checkpointing, **VOCABULARY), "tensor=2")


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(
    "plan",
    [
        "tensor=2",
        "tensor=2 sequence=true",
        "context=2",
        "context=2 tensor=2 sequence=true",
        "data=2 tensor=2 zero=3 sequence=true",
        "pipeline=3 tensor=2 microbatches=3 schedule=zero-bubble",
        "pipeline=2 context=2 tensor=2 microbatches=2",
    ],
)
def test_families_and_axes(kind: str, plan: str) -> None:
    prove(kind, plan, steps=20)
