"""What people do in a loop of their own works with an engine: schedulers of torch, compiled models,
optimizers with state of other shapes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import echelon
from echelon import UserError
from echelon.launching import Ranks

Warm = Callable[[int], Ranks]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 6, generator=generator).double(), torch.randint(5, (4,), generator=generator)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def loop() -> dict[str, Tensor]:
    plain = model()
    optimizer = adamw(plain.parameters())
    scheduler = schedule(optimizer)
    for step in range(4):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(plain(inputs), targets).backward()
        optimizer.step()
        scheduler.step()
    return plain.state_dict()


def scheduled(plan: str) -> tuple[float, dict[str, Tensor]]:
    with echelon.parallelize(
        model(), f"{plan} precision=fp64", optimizer=adamw, loss=F.cross_entropy
    ) as engine:
        scheduler = schedule(engine.optimizer)
        for step in range(4):
            engine.step(engine.local(batch(step)))
            scheduler.step()
        return engine.learning_rate, engine.full_state_dict()


def check_scheduled(plan: str) -> None:
    rate, weights = scheduled(plan)
    assert rate == 0.1 / 2**4
    torch.testing.assert_close(weights, loop(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("plan", ["data=1", "zero=1", "zero=3", "microbatches=2"])
def test_a_scheduler_of_torch_over_the_engines_optimizer(plan: str) -> None:
    check_scheduled(plan)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("plan", ["data=2", "data=2 zero=2", "data=2 zero=3", "pipeline=2 microbatches=2"])
def test_a_scheduler_of_torch_on_every_rank(warm_ranks: Warm, plan: str) -> None:
    warm_ranks(2).run(check_scheduled, plan)


@pytest.mark.parametrize("plan", ["schedule=pipedream microbatches=2", "sync=async"])
def test_a_scheduler_is_refused_where_updates_are_no_steps(plan: str) -> None:
    engine = echelon.parallelize(model(), plan, optimizer=adamw, loss=F.cross_entropy)
    schedule(engine.optimizer)
    with pytest.raises(UserError, match="use parallelize"):
        engine.step((batch(0)[0].float(), batch(0)[1]))
    engine.close()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of torch.compile itself
def test_compiled_models_are_taken_as_what_they_were_made_of() -> None:
    """Their names had `_orig_mod` in them, and their hooks did not run."""
    made = model()
    names = list(made.state_dict())
    made[0] = torch.compile(made[0], backend="eager")  # type: ignore[assignment]
    made[2].compile(backend="eager")
    compiled: Any = torch.compile(made, backend="eager")
    with echelon.parallelize(compiled, "precision=fp64", optimizer=adamw, loss=F.cross_entropy) as engine:
        assert list(engine.full_state_dict()) == names
        assert engine.module is made
        assert type(made[0]) is nn.Linear
        assert made[2]._compiled_call_impl is None
        engine.step(batch(0))
        inside = made(batch(0)[0])
    assert type(made[0]) is torch._dynamo.OptimizedModule, "compiled as before"
    assert made[2]._compiled_call_impl is not None
    torch.testing.assert_close(compiled(batch(0)[0]), inside)


def test_factored_state_is_whole_in_the_optimizer_state() -> None:
    def adafactor(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(parameters, lr=0.1)

    with echelon.parallelize(model(), "precision=fp64", optimizer=adafactor, loss=F.cross_entropy) as engine:
        engine.step(batch(0))
        state = engine.full_optimizer_state()["0.weight"]
    assert {name: tuple(each.shape) for name, each in state.items()} == {
        "row_var": (8, 1),
        "col_var": (1, 6),
        "step": (),
    }


def sparse(plan: str) -> None:
    embedding = nn.Sequential(nn.Embedding(7, 5, sparse=True))
    with echelon.parallelize(
        embedding, plan, optimizer=lambda p: torch.optim.SparseAdam(list(p)), loss=F.cross_entropy
    ) as engine:
        engine.step(engine.local((torch.tensor([1, 2, 3, 1]), torch.tensor([0, 1, 2, 3]))))
        assert engine.full_optimizer_state()["0.weight"]["exp_avg"].shape == (7, 5)


def test_sparse_adam_trains_one_replica_and_is_refused_for_more(warm_ranks: Warm) -> None:
    sparse("microbatches=2")
    warm_ranks(2).run(check_sparse_refused)


def check_sparse_refused() -> None:
    with pytest.raises(UserError, match="takes sparse gradients alone"):
        sparse("data=2")


class Complex(nn.Module):
    """A complex weight beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rotated = nn.Parameter(torch.randn(6, 5, dtype=torch.complex128))
        self.linear = nn.Linear(5, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        rotated: Tensor = (x.to(torch.complex128) @ self.rotated).abs()
        return self.linear(rotated)  # type: ignore[no-any-return]


def train_complex(plan: str) -> tuple[list[float], dict[str, Tensor]]:
    with echelon.parallelize(
        Complex(), f"{plan} precision=fp64", optimizer=adamw, loss=F.cross_entropy, clip=0.5
    ) as engine:
        norms = [engine.step(engine.local(batch(step))).grad_norm for step in range(3)]
        return norms, engine.full_state_dict()


def check_complex(plan: str) -> None:
    plain = Complex()
    optimizer = adamw(plain.parameters())
    norms, weights = train_complex(plan)
    for step, norm in enumerate(norms):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(plain(inputs), targets).backward()
        assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5)), rel=1e-12)
        optimizer.step()
    torch.testing.assert_close(weights, plain.state_dict(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("plan", ["data=1", "zero=3 microbatches=2"])
def test_complex_weights_beside_real_ones(plan: str) -> None:
    check_complex(plan)


@pytest.mark.parametrize("plan", ["data=2", "data=2 zero=1", "data=2 zero=3"])
def test_complex_weights_on_every_rank(warm_ranks: Warm, plan: str) -> None:
    warm_ranks(2).run(check_complex, plan)
