"""layers() that is not the model's forward: a pipeline would train another model than one device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import echelon
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.models import ModelConfig, build, cross_entropy
from tests.cases import mean_loss, sgd

Warm = Callable[[int], Ranks]


class Listed(nn.Module):
    """Its layers are its forward, but for one mistake."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        self.mistake = mistake
        self.first, self.dropout, self.middle = nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 8)
        self.norm, self.last = nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 5)

    def layers(self) -> list[nn.Module]:
        layers = [self.first, self.dropout, self.middle, self.norm, self.last]
        if self.mistake == "order":
            layers[1], layers[2] = layers[2], layers[1]
        if self.mistake in ("dropout", "norm"):
            layers.remove(getattr(self, self.mistake))
        return layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in [self.first, self.dropout, self.middle, self.norm, self.last]:
            x = layer(x)
        return 2 * x if self.mistake == "scale" else x


class Uncopied(Listed):
    """Keeps a tensor with a history, which torch does not copy."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = self.first.weight * 2


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 6, generator=generator), torch.randint(5, (8,), generator=generator)


HELD = "gradients: held"


def own_forward(
    plan: str, model: Callable[..., nn.Module], *args: Any, loss: Callable[..., Any] = mean_loss
) -> str:
    """In a rank: the error of its first step, or what the entry found; and the traffic that is no check."""
    torch.manual_seed(0)
    engine = echelon.parallelize(model(*args), plan, optimizer=sgd, loss=loss)
    try:
        engine.step(engine.local(batch()))
    except UserError as error:
        return str(error)
    return str(engine.audit[1])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "plan", ["pipeline=2 microbatches=2", "pipeline=2 schedule=pipedream microbatches=4"]
)
def test_a_pipeline_is_compared_with_the_forward(warm_ranks: Warm, plan: str) -> None:
    ranks = warm_ranks(2)
    assert set(ranks.run(own_forward, plan, Listed)) == {HELD}
    for mistake in ("order", "dropout", "norm", "scale"):
        first, second = ranks.run(own_forward, plan, Listed, mistake)
        assert "layers() is not what forward does" in first
        assert first == second


def test_asynchronous_workers_compare_each_for_itself(warm_ranks: Warm, tmp_path: Path) -> None:
    order = tmp_path / "order.txt"
    order.write_text("stage 0: 0\nstage 1: 0\nrank 0: F0@0 F0@1 B0@1 B0@0\n", encoding="utf-8")
    plan = f"data=2 sync=async schedule={order}"
    assert warm_ranks(2).run(own_forward, plan, Listed) == [HELD] * 2
    assert all("layers() is not" in said for said in warm_ranks(2).run(own_forward, plan, Listed, "norm"))


def loss_of_microbatches(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.view(-1, 4, 5).flatten(0, 1), targets)


def own_forward_with_loss_of_microbatches(plan: str) -> str:
    return own_forward(plan, Listed, loss=loss_of_microbatches)


def test_a_loss_that_takes_no_single_sample_is_given_microbatches(warm_ranks: Warm) -> None:
    assert warm_ranks(2).run(own_forward_with_loss_of_microbatches, "pipeline=2 microbatches=2") == [HELD] * 2


def test_what_cannot_be_copied_is_compared(warm_ranks: Warm) -> None:
    assert warm_ranks(2).run(own_forward, "pipeline=2 microbatches=2", Uncopied) == [HELD] * 2


def token_loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same as echelon's, but unknown to it."""
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), (targets >= 0).sum()


def mean_of_tokens(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


LOSSES: dict[str, Any] = {"known": cross_entropy, "pair": token_loss, "mean": mean_of_tokens}


def gpt_results(plan: str, *, loss: str) -> list[str]:
    torch.manual_seed(0)
    model = build(ModelConfig("gpt", 2, 16, 4, vocab=32, sequence=8, dropout=0.1))
    engine = echelon.parallelize(model, plan, optimizer=sgd, loss=LOSSES[loss])
    tokens = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(0))
    engine.step(engine.local((tokens[:, :-1], tokens[:, 1:])))
    return [str(result) for result in engine.audit]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ("context=2 microbatches=2", 2),
        ("tensor=2 sequence=true microbatches=2", 2),
        pytest.param("data=2 pipeline=2 zero=3 microbatches=2", 4, marks=pytest.mark.slow),
        pytest.param("pipeline=2-1 microbatches=2", 3, marks=pytest.mark.slow),
        pytest.param("pipeline=2 schedule=interleaved chunks=2 microbatches=2", 2, marks=pytest.mark.slow),
    ],
)
def test_a_transformer_holds_under_every_plan_by_layers(warm_ranks: Warm, plan: str, ranks: int) -> None:
    for loss in LOSSES:
        for told in warm_ranks(ranks).run(_run_gpt, plan, loss):
            assert told == ["finite weights: held", HELD]


def _run_gpt(plan: str, loss: str) -> list[str]:
    return gpt_results(plan, loss=loss)
