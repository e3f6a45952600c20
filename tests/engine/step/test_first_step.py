"""What the first step shows: every rank refuses before the update what one device would train otherwise."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon import UserError
from echelon.launching import Ranks
from tests.cases import adamw, mean_loss, sgd, vectors

Warm = Callable[[int], Ranks]


class Clamping(nn.Linear):
    """Clamps its last row, which is one rank's part alone, through `.data`."""

    def __init__(self, how: str) -> None:
        super().__init__(6, 6)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            self.weight.data[-1].clamp_(-0.01, 0.01)
        elif self.how == "other memory":
            self.weight.data = self.weight.data.clamp(-0.01, 0.01)
        return super().forward(x)


class Averaging(nn.Module):
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("calls", torch.zeros(()))
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.average.lerp_(x.detach().mean(0), 0.1)
        self.calls += 1
        return self.last(x)  # type: ignore[no-any-return]


class Counting(nn.Linear):
    """Its buffer is the same on all replicas."""

    def __init__(self) -> None:
        super().__init__(6, 5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def clamping(how: str) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Clamping(how), nn.Linear(6, 5))


class ToSparse(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to_sparse()


class ToDense(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to_dense()


def returning_sparse() -> nn.Module:
    return nn.Sequential(ToSparse(6, 6), ToDense(), nn.Linear(6, 5))


def hooked_on_one_rank() -> nn.Module:
    model = nn.Linear(6, 5)
    if torch.distributed.get_rank() == 1:
        model.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    return model


def refusals(cases: list[tuple[Callable[..., nn.Module], tuple[object, ...], str]]) -> list[str]:
    """The error of the first step of each case, or nothing; no weight has changed."""
    errors = []
    for make, args, plan in cases:
        torch.manual_seed(0)
        with echelon.parallelize(
            make(*args), plan, optimizer=adamw, loss=mean_loss, smallest_unit=0, seed=None
        ) as engine:
            before = engine.full_state_dict()
            try:
                engine.step(engine.local(vectors(0)))
                errors.append("")
            except UserError as error:
                errors.append(str(error))
                after = engine.full_state_dict()
                assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    return errors


def test_ranks_refuse_together_what_a_rank_has_found(warm_ranks: Warm) -> None:
    """With zero=3 changes through `.data` were lost; buffers of samples became replica 0's."""
    cases: list[tuple[Callable[..., nn.Module], tuple[object, ...], str]] = [
        (clamping, ("not",), "data=2 zero=3"),
        (clamping, ("in place",), "data=2 zero=3"),
        (clamping, ("other memory",), "data=2 zero=3"),
        (Averaging, (), "data=2"),
        (Counting, (), "data=2"),
        (hooked_on_one_rank, (), "data=2"),
        (returning_sparse, (), "data=2 zero=3"),
    ]
    for errors in warm_ranks(2).run(refusals, cases):
        unchanged, in_place, elsewhere, average, counters, hooks, sparse = errors
        assert (unchanged, counters, sparse) == ("", "", "")
        assert "would not train as on one device" in in_place or "1.weight: changed" in in_place
        assert "would not train as on one device" in elsewhere or "1.weight: changed" in elsewhere
        assert "would leave something else than one device in a buffer (average)" in average
        assert "weight" in hooks


class Failing(nn.Module):
    """Fails where somebody has read the weight of a module that was not called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 5)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.first(x))
        if self.fails:
            raise RuntimeError("as told")
        return x


def read_after_failure() -> list[str]:
    errors = []
    model = Failing()
    engine = echelon.parallelize(model, "data=2 zero=3", optimizer=sgd, loss=mean_loss, smallest_unit=0)
    engine.step(engine.local(vectors(0)))
    for run in (engine.step, engine.evaluate):
        model.fails = True
        with pytest.raises(RuntimeError, match="as told"):
            run(engine.local(vectors(1)))
        if engine.replica == 0:  # one rank alone: it waited for the other forever
            with pytest.raises(UserError) as error:
                model.first.weight.sum()
            errors.append(str(error.value))
        model.fails = False
        torch.distributed.barrier()
        engine.step(engine.local(vectors(2)))
    engine.close()
    return errors


def test_a_weight_that_one_rank_reads_after_a_failed_pass_is_an_error(warm_ranks: Warm) -> None:
    errors, none = warm_ranks(2).run(read_after_failure)
    assert len(errors) == 2
    assert none == []
    assert all(error.startswith("first.weight has no values on this rank") for error in errors)
