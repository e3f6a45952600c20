"""Models of transformers, as they are, with their layers split over ranks."""

from typing import Any

import pytest
from torch import nn

from echelon.errors import UserError
from echelon.nn.huggingface.families import ENCODERS, FAMILIES
from echelon.nn.huggingface.modules import draws_by_function, draws_by_head
from echelon.nn.huggingface.tensor_tables import TENSOR_TABLES
from echelon.parallel.tensor.styles import Styles
from echelon.verify import Case, assert_equal
from tests.cases import adamw
from tests.nn.huggingface import encoders
from tests.nn.huggingface.models import KINDS, OLDER, case, make, tokens
from tests.nn.huggingface.test_attention import Spread, spread_over
from tests.nn.huggingface.timm_like import VisionTransformer, images

pytestmark = pytest.mark.usefixtures("warm_contract")

# The table splits a vocabulary that ranks divide.
VOCABULARY = {"vocab_size": 32}
WIDE_WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "phi3": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "gemma2": {"sliding_window": 16, "attn_logit_softcapping": None},
    "gemma3": {"sliding_window": 16},
}
NEWER = [kind for kind in KINDS if kind not in OLDER]


def prove(kind: str, plan: str, steps: int, **changes: Any) -> None:
    changes |= WIDE_WINDOWS.get(kind, {}) if "context" in plan else {}
    verdict = assert_equal(case(kind, steps, **changes), plan)
    print(f"{verdict.worst[1]:.1e} {kind} {verdict.plan}")


@pytest.mark.slow_cases("pipeline=2-llama", "tensor=2-gpt2")
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
    prove(kind, plan, steps=20, **VOCABULARY)


@pytest.mark.slow_cases("gpt2")
@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.slow), "gpt2"])
def test_all_axes_together(kind: str) -> None:
    prove(kind, "data=2 tensor=2 pipeline=2 zero=1 sequence=true microbatches=2", steps=6, **VOCABULARY)


@pytest.mark.slow_cases("mistral", "mixtral", "qwen2", "qwen3")
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral", "mixtral"])
def test_the_other_families(kind: str) -> None:
    prove(kind, "tensor=2 sequence=true", steps=4, **VOCABULARY)


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases("phi3")
@pytest.mark.parametrize("kind", ["gemma2", "phi3", "falcon"])
def test_attention_of_other_kinds(kind: str) -> None:
    """With a vocabulary that is padded: behind the head, Gemma's cap made the padding of logits finite."""
    prove(kind, "tensor=2", steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", NEWER)
@pytest.mark.parametrize(
    "plan",
    [
        "tensor=2",
        "tensor=2 sequence=true",
        "context=2",
        "data=2 tensor=2 zero=3 sequence=true",
        "pipeline=2 tensor=2 microbatches=2 schedule=zero-bubble",
    ],
)
def test_newer_families_and_axes(kind: str, plan: str) -> None:
    if "context" in plan and kind.startswith(("falcon", "bloom")):
        with pytest.raises(UserError, match="cannot ask other ranks for keys; use context=1"):
            prove(kind, plan, steps=1)
    else:
        prove(kind, plan, steps=4)


def test_capped_scores_are_refused_where_ranks_share_a_sequence() -> None:
    """They were attended to without their cap."""
    with pytest.raises(UserError, match=r"attn_logit_softcapping=5\.0\) cannot share its sequence"):
        spread_over(make("gemma2", sliding_window=16).eval(), Spread(), tokens(0)[0])


def test_weights_that_bloom_reads_without_calling_are_refused() -> None:
    model = make("bloom", pretraining_tp=2, slow_but_exact=True)
    with pytest.raises(
        UserError, match=r"reads the weights of matrices without calling them; set config\.slow"
    ):
        Styles(model, None)


@pytest.mark.parametrize("changes", [{"hidden_dropout": 0.1}, {"attention_dropout": 0.1}])
def test_dropout_of_whole_states_by_a_function_is_not_drawn_by_head(changes: dict[str, float]) -> None:
    """Ranks drew different masks for states that must be equal, and drifted apart in silence."""
    layer = make("falcon", parallel_attn=False, **changes).transformer.h[0]  # type: ignore[union-attr,index]
    assert draws_by_function(layer)
    assert not draws_by_head(layer)


def test_a_vision_transformer_of_timm() -> None:
    case = Case(VisionTransformer, images, encoders.label_loss, adamw, steps=3)
    assert_equal(case, "tensor=2")


def test_every_family_has_a_table_and_every_line_fits_one_of_its_models() -> None:
    assert TENSOR_TABLES.keys() == {*FAMILIES, *ENCODERS, "T5ForConditionalGeneration", "VisionTransformer"}
    models = [*map(make, KINDS), *map(encoders.make, encoders.KINDS), VisionTransformer()]
    for table in TENSOR_TABLES.values():
        classes = {name for name, other in TENSOR_TABLES.items() if other is table}
        unused = [
            {pattern for pattern, _ in Styles(model, table).unused()}
            for model in models
            if classes & {cls.__name__ for cls in type(model).__mro__}
        ]
        assert set.intersection(*unused) == set()


def checkpointing(kind: str, **changes: Any) -> nn.Module:
    model = make(kind, **changes)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


@pytest.mark.slow_cases("gpt2", "llama")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_layers_that_are_computed_again(kind: str) -> None:
    """Their columns were computed together in one of the two passes, and one by one in the other."""
    assert_equal(case(kind, 4, checkpointing, **VOCABULARY), "tensor=2")


@pytest.mark.slow
@pytest.mark.parametrize("kind", OLDER)
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
    prove(kind, plan, steps=20, **VOCABULARY)
