"""Models of transformers train equal to one device: a few steps here, twenty and all plans in `make fuzz`."""

from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.engine import parallelize
from echelon.models import cross_entropy
from echelon.verify import assert_equal
from tests.cases import adamw
from tests.nn.huggingface.models import EAGER_ONLY, KINDS, OLDER, case, make, tokens

PLANS = [
    "pipeline=2 schedule=1f1b microbatches=2",
    "data=2 zero=1",
    "data=2 zero=3",
    "pipeline=2 data=2 microbatches=2",
]


def prove(kind: str, plan: str, **changes: Any) -> None:
    verdict = assert_equal(case(kind, **changes), plan)
    print(f"{verdict.worst[1]:.1e} {kind} {verdict.plan}")


@pytest.mark.slow_cases(
    "gpt2-pipeline=2 data=2 microbatches=2",
    "llama-data=2 zero=3",
    "llama-pipeline=2 schedule=1f1b microbatches=2",
)
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("llama", PLANS[0]),
        ("gpt2", PLANS[1]),
        ("llama", PLANS[2]),
        ("gpt2", PLANS[3]),
        pytest.param("gpt2", PLANS[0], marks=pytest.mark.slow),
        pytest.param("llama", PLANS[1], marks=pytest.mark.slow),
        pytest.param("gpt2", PLANS[2], marks=pytest.mark.slow),
        pytest.param("llama", PLANS[3], marks=pytest.mark.slow),
    ],
)
def test_training_is_equal_to_one_device(kind: str, plan: str) -> None:
    prove(kind, plan, steps=3, tie_word_embeddings=True)


@pytest.mark.slow_cases("mistral", "mixtral", "qwen3")
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral", "mixtral"])
def test_every_family_trains_in_stages(kind: str) -> None:
    prove(kind, PLANS[0], steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "plan",
    [
        *PLANS,
        "data=2",
        "data=2 zero=2",
        "pipeline=2 data=2 zero=1 microbatches=2",
        "pipeline=2 data=2 zero=3 microbatches=2",
        "pipeline=2 schedule=interleaved chunks=2 microbatches=2",
        "pipeline=3 schedule=zero-bubble microbatches=4",
        "pipeline=2-1 microbatches=3",
        "pipeline=auto microbatches=2",
    ],
)
@pytest.mark.parametrize("kind", OLDER)
def test_every_family_is_equal_under_every_plan(kind: str, plan: str, tied: bool) -> None:
    prove(kind, plan, tie_word_embeddings=tied)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in OLDER])
def test_newer_families_are_equal_too(kind: str, plan: str, tied: bool) -> None:
    prove(kind, plan, steps=4, tie_word_embeddings=tied)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in EAGER_ONLY])
def test_eager_attention_too(kind: str) -> None:
    prove(kind, PLANS[0], attention="eager")


def test_dropout_of_gpt2_is_keyed_in_every_layout() -> None:
    prove("gpt2", PLANS[0], steps=2, resid_pdrop=0.1, embd_pdrop=0.1)


def names_and_type(kind: str, plan: str) -> tuple[list[str], str]:
    torch.manual_seed(0)
    seen = []

    def loss(output: Any, targets: Tensor) -> Any:
        seen.append(type(output).__name__)
        return cross_entropy(output, targets)

    engine = parallelize(make(kind), plan, optimizer=adamw, loss=loss, audit="off")  # which calls it too
    engine.step(engine.local(tokens(0)))
    return list(engine.full_state_dict()), " ".join(set(seen))


@pytest.mark.parametrize("kind", ["mixtral", "gpt2"])
def test_state_dicts_have_the_original_names_and_losses_see_the_original_type(
    kind: str, warm_ranks: Any
) -> None:
    names = list(make(kind).state_dict())
    found = warm_ranks(2).run(names_and_type, kind, "pipeline=2 microbatches=2 precision=fp32")
    own = type(make(kind)(tokens(0)[0])).__name__
    assert [names_of_rank for names_of_rank, _ in found] == [names, names]
    assert [kinds for _, kinds in found] == ["", own]
