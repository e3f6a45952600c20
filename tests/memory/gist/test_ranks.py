"""compress over several ranks: equal to one device; and what it says when it finds nothing."""

import dataclasses
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.models import ModelConfig, build
from echelon.verify import Case, assert_equal, verify
from tests.cases import adamw
from tests.contract_models import SEQUENCE, VOCAB, class_loss, token_loss, tokens

pytestmark = pytest.mark.usefixtures("warm_contract")

Warm = Callable[[int], Ranks]


class Residual(nn.Module):
    """ReLU by function, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(6, 6, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + x)


def network() -> nn.Module:
    """ReLU before pools and convolutions, as modules and as functions."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)),
        Residual(),
        nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(6, 6, 2), nn.ReLU(), nn.Dropout(0.2)),
        nn.Sequential(nn.Flatten(), nn.Linear(54, 5)),
    )


def pictures(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, 3, 18, 18, generator=generator)
    return inputs, torch.randint(5, (8,), generator=generator)


def gpt() -> nn.Module:
    return build(ModelConfig("gpt", 4, 16, 2, vocab=VOCAB, sequence=SEQUENCE, dropout=0.2))


IMAGES = Case(network, pictures, class_loss, adamw, steps=4, clip=None)
TOKENS = Case(gpt, tokens, token_loss, adamw, steps=4, clip=None)

FAST = [
    (IMAGES, "pipeline=2 microbatches=2 recompute=full compress=gist"),
    (TOKENS, "tensor=2 microbatches=2 sequence=true compress=gist-fp8"),
]
_SCHEDULES = ["naive", "gpipe", "1f1b", "zero-bubble", "pipedream", "pipedream-vertical", "pipedream-2bw"]
SLOW = [
    *((IMAGES, f"data=2 zero={level} compress=gist") for level in range(4)),
    *((IMAGES, f"pipeline=2 microbatches=4 schedule={name} compress=gist") for name in _SCHEDULES),
    *((TOKENS, f"pipeline=2 microbatches=4 schedule={name} compress=gist-fp8") for name in _SCHEDULES),
    *(
        (TOKENS, f"data=2 zero=3 recompute={kind} compress=gist-fp10")
        for kind in ("full", "sqrt", "selective")
    ),
    (TOKENS, "tensor=2 recompute=full checkpoints=split compress=gist-fp8"),
    (TOKENS, "context=2 attention=ring compress=gist-fp8"),
    (TOKENS, "context=2 attention=all-to-all compress=gist-fp16"),
    (TOKENS, "data=2 sync=parameter-server compress=gist-fp8"),
    (TOKENS, "pipeline=2 microbatches=2 update=last-backward compress=gist-fp8"),
]


@pytest.mark.slow_cases("-tensor=2 microbatches=2 sequence=true compress=gist-fp8")
@pytest.mark.parametrize(
    ("case", "plan"),
    [*FAST, *(pytest.param(case, plan, marks=pytest.mark.slow) for case, plan in SLOW)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_plans_are_equal_to_one_device(case: Case, plan: str) -> None:
    assert_equal(case if (case, plan) in FAST else dataclasses.replace(case, steps=12), plan)


def step_once(compress: str) -> list[str]:
    """The warnings of one step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = f"compress={compress}"
        with echelon.parallelize(gpt(), plan, optimizer=adamw, loss=token_loss, audit="off") as engine:
            for step in range(2):
                engine.step(engine.local(tokens(step)))
    return [str(each.message) for each in caught if "compress" in str(each.message)]


def test_a_model_without_relu_is_told_so_once(warm_ranks: Warm) -> None:
    ((message,),) = warm_ranks(1).run(step_once, "gist")
    assert "save nothing that compress=gist encodes" in message
    assert "compress=gist-fp16" in message
    assert warm_ranks(1).run(step_once, "gist-fp8") == [[]]


def test_lossy_formats_are_proven_in_float64() -> None:
    with pytest.raises(
        UserError, match=r"compress=gist-fp8: one device in bf16 does not round.*verify in fp64"
    ):
        verify(TOKENS, "data=2 compress=gist-fp8", precision="bf16")
