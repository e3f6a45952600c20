"""engine.load: what fits, what is refused with all reasons at once, and what becomes of the engine."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon
from echelon.engine import Engine, parallelize
from echelon.errors import UserError
from echelon.state.checkpoint.manifest import MANIFEST
from echelon.state.checkpoint.saved import SavedState
from echelon.state.weight_files import tensor_file
from echelon.state.weight_files.tensor_file import read_header
from echelon.update.optim import CombinedOptimizer
from tests.state.checkpoint.small import record_of

Make = Callable[[Any], Any]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def make_engine(
    model: nn.Module | None = None, plan: str = "precision=fp64", optimizer: Make = adamw, **options: Any
) -> Engine:
    given = small_model() if model is None else model
    return parallelize(given, plan, optimizer=optimizer, loss=mean_loss, **{"audit": "off", **options})


def mean_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output, targets.to(output.dtype))  # torch 2.11 has no gradient for two types


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 4, generator=generator, dtype=dtype), torch.zeros(4, 2, dtype=dtype)


def train(engine: Engine, begin: int, end: int, dtype: torch.dtype = torch.float64) -> None:
    for step in range(begin, end):
        engine.step(batch(step, dtype))


def saved(engine: Engine, path: Path, steps: int = 2, dtype: torch.dtype = torch.float64) -> Path:
    train(engine, 0, steps, dtype)
    engine.save(path)
    return path


def copied(engine: Engine) -> dict[str, Tensor]:
    state = {
        f"{name} {part}": t
        for name, parts in engine.full_optimizer_state().items()
        for part, t in parts.items()
    }
    return {name: tensor.clone() for name, tensor in (engine.full_state_dict() | state).items()}


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    assert not [name for name in a if not torch.equal(a[name], b[name])]


def goes_on(engine: Engine, other: Engine, path: Path, *, dtype: torch.dtype = torch.float64) -> None:
    """An engine saves and goes on, and so does the other one from there: they end alike."""
    saved(engine, path, dtype=dtype)
    train(engine, 2, 4, dtype)
    other.load(path)
    assert other.steps == 2
    train(other, 2, 4, dtype)
    assert_same(copied(engine), copied(other))


# What does not fit.


def test_all_errors_are_named_at_once_and_nothing_changes(tmp_path: Path) -> None:
    path = saved(make_engine(), tmp_path / "a")
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(6, 2, bias=False))
    model.head = nn.Linear(2, 2)
    model[2].register_buffer("weight_scale", torch.zeros(3))
    engine = make_engine(model)
    before = copied(engine)
    with pytest.raises(UserError) as raised:
        engine.load(path)
    text = str(raised.value)
    assert "0.weight has shape (6, 4) in the checkpoint, and (7, 4) in the model" in text
    assert "0.bias has shape (6,) in the checkpoint, and (7,) in the model" in text
    assert "head.weight is missing in the checkpoint" in text
    assert "2.bias is in the checkpoint, and not in the model" in text
    assert "2.weight_scale is missing" in text
    assert str(path) in text
    assert_same(before, copied(engine))


def test_a_buffer_of_another_kind_of_numbers_is_refused(tmp_path: Path) -> None:
    first, second = small_model(), small_model()
    first.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
    second.register_buffer("seen", torch.zeros(2))
    path = saved(make_engine(first), tmp_path / "a")
    with pytest.raises(UserError, match="seen is int64 in the checkpoint, and float64 in the model"):
        make_engine(second).load(path)


@pytest.mark.parametrize(
    ("optimizer", "keeps"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "SGD, keeps momentum_buffer"),
        (lambda p: torch.optim.SGD(p, lr=0.1), "SGD, keeps nothing"),
        (
            lambda p: torch.optim.AdamW(p, amsgrad=True),
            "AdamW, keeps exp_avg, exp_avg_sq, max_exp_avg_sq, step",
        ),
        (echelon.optim.SM3, "SM3, keeps accumulator_0"),
    ],
    ids=["momentum", "sgd", "amsgrad", "sm3"],
)
def test_state_of_another_optimizer_is_refused_and_can_be_left_out(
    optimizer: Make, keeps: str, tmp_path: Path
) -> None:
    engine = make_engine()
    path = saved(engine, tmp_path / "a")
    other = make_engine(optimizer=optimizer)
    train(other, 0, 1)
    before = copied(other)
    with pytest.raises(
        UserError, match=f"the checkpoint has exp_avg, exp_avg_sq, step of .*{keeps}"
    ) as raised:
        other.load(path)
    assert "load(path, optimizer=False)" in str(raised.value)
    assert_same(before, copied(other))
    other.load(path, optimizer=False)
    assert_same(engine.full_state_dict(), other.full_state_dict())
    assert not any(other.full_optimizer_state().values())
    assert other.steps == 2


def test_a_load_that_fails_on_its_way_leaves_an_engine_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    path = saved(engine, tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "_read_box", lambda *_: (_ for _ in ()).throw(UserError("damaged")))
        with pytest.raises(UserError, match="damaged"):
            engine.load(path)
    with pytest.raises(UserError, match=r"has failed.*load a whole checkpoint"):
        engine.step(batch(2))
    with pytest.raises(UserError, match="cannot be read"):
        engine.load(tmp_path / "b")
    with pytest.raises(UserError, match="has failed"):
        engine.full_state_dict()
    engine.load(path)
    train(engine, 2, 3)
    engine.close()


# What fits.


def test_an_engine_that_has_trained_goes_back(tmp_path: Path) -> None:
    engine, other = make_engine(), make_engine()
    train(other, 7, 11)
    goes_on(engine, other, tmp_path / "a")
    other.load(tmp_path / "a")
    other.load(tmp_path / "a")
    train(other, 2, 4)
    assert_same(copied(engine), copied(other))


@pytest.mark.parametrize("plan", ["precision=fp64", "precision=bf16", "precision=bf16 offload=optimizer"])
def test_a_checkpoint_of_before_the_first_step_takes_state_away(plan: str, tmp_path: Path) -> None:
    """Also the float32 masters: they would bring back the weights that were trained."""
    dtype = torch.float64 if "fp64" in plan else torch.float32
    engine, other = make_engine(plan=plan), make_engine(plan=plan)
    engine.save(tmp_path / "a")
    train(other, 5, 7, dtype)
    other.load(tmp_path / "a")
    assert not any(value.any() for parts in other.full_optimizer_state().values() for value in parts.values())
    train(engine, 0, 2, dtype)
    train(other, 0, 2, dtype)
    assert_same(copied(engine), copied(other))
    assert other.steps == 2


class Unused(nn.Module):
    """Frozen, tied and unused parameters, one number, statistics, and a convolution that lies otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.convolution = nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last)
        self.scale, self.unused = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(3))
        self.last = nn.Linear(4, 2)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.norm(self.first(x))) * self.scale
        image = y.view(-1, 1, 2, 2).expand(-1, 2, 2, 2)
        return self.last(y) + self.convolution(image).flatten(1)


@pytest.mark.parametrize("plan", ["precision=fp64", "offload=optimizer precision=fp64"])
def test_frozen_tied_unused_and_strided_parameters_and_statistics(plan: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    engine = make_engine(Unused(), plan)
    torch.manual_seed(1)
    other = make_engine(Unused(), plan)
    train(other, 4, 5)
    goes_on(engine, other, tmp_path / "a")
    state = other.full_optimizer_state()
    assert not state["unused"]
    assert state["scale"]["step"].shape == ()


def test_masters_are_finer_than_the_weights(tmp_path: Path) -> None:
    """bf16 with masters, then float32 and back: no bit of a master is lost."""
    engine = make_engine(plan="precision=bf16")
    path = saved(engine, tmp_path / "a", dtype=torch.float32)
    masters = {each.slice.name: each.tensor for each in engine.owned() if each.slice.part == "master"}
    in_float32 = make_engine(plan="precision=fp32")
    in_float32.load(path)
    assert_same(masters, in_float32.full_state_dict())
    in_float32.save(tmp_path / "b")
    again = make_engine(plan="precision=bf16")
    again.load(tmp_path / "b")
    assert_same(copied(engine), copied(again))
    assert_same(
        masters, {each.slice.name: each.tensor for each in again.owned() if each.slice.part == "master"}
    )
    assert any(not torch.equal(masters[name], value) for name, value in engine.full_state_dict().items())


@pytest.mark.parametrize(("saving", "steps"), [("precision=bf16", 0), ("precision=bf16 masters=false", 2)])
@pytest.mark.parametrize("plan", ["precision=bf16", "precision=bf16 offload=optimizer"])
def test_no_master_of_before_stays_after_a_checkpoint_without_any(
    plan: str, saving: str, steps: int, tmp_path: Path
) -> None:
    path = saved(make_engine(plan=saving), tmp_path / "a", steps, torch.bfloat16)
    assert "master" not in SavedState.open(path).parts("0.weight")
    trained, fresh = make_engine(plan=plan), make_engine(plan=plan)
    train(trained, 5, 9, torch.bfloat16)
    for engine in (trained, fresh):
        engine.load(path)
        train(engine, steps, steps + 2, torch.bfloat16)
    assert_same(copied(trained), copied(fresh))


def test_a_deferred_model_takes_a_checkpoint(tmp_path: Path) -> None:
    goes_on(make_engine(), make_engine(echelon.deferred(small_model)), tmp_path / "a")


# The optimizer's options and state.


def groups_of(rate: float, decay: float) -> Make:
    def make(parameters: Any) -> torch.optim.Optimizer:
        given = list(parameters)
        matrices, vectors = [p for p in given if p.dim() > 1], [p for p in given if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "betas": (0.8, 0.9)}]
        return torch.optim.AdamW(groups, lr=rate)

    return make


def test_options_of_groups_come_back_unless_they_are_kept(tmp_path: Path) -> None:
    path = saved(make_engine(optimizer=groups_of(0.02, 0.5)), tmp_path / "a")
    engine = make_engine(optimizer=groups_of(0.01, 0.1))
    engine.load(path, options=False)
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.01, 0.01]
    engine.load(path)
    matrices, vectors = engine.optimizer.param_groups
    assert (matrices["lr"], matrices["weight_decay"]) == (0.02, 0.5)
    assert (vectors["lr"], vectors["betas"]) == (0.02, (0.8, 0.9))
    one = make_engine()
    with pytest.raises(UserError, match=r"group 0 .* were in 2 groups, with different betas, weight_decay"):
        one.load(path)
    one.load(path, options=False)


def test_groups_in_another_order_are_found_by_name(tmp_path: Path) -> None:
    path = saved(make_engine(optimizer=groups_of(0.02, 0.5)), tmp_path / "a")

    def make(parameters: Any) -> torch.optim.Optimizer:
        *given, last = list(parameters)
        return torch.optim.AdamW(
            [{"params": [last]}, {"params": [p for p in given if p.dim() > 1]}, {"params": given[1:2]}]
        )

    engine = make_engine(optimizer=make)
    engine.load(path)
    assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.01, 0.5, 0.01]


class Counting(torch.optim.Optimizer):
    """Keeps a number that is no tensor, and nothing under another key."""

    needs = "element"

    def __init__(self, params: Any, kept: Any = None) -> None:
        super().__init__(params, {"lr": 0.1})
        self.kept = kept

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"], state["kept"] = state.get("count", 0) + 1, self.kept
                    state["sum"] = state.get("sum", 0) + p.grad.abs()
                    p -= group["lr"] / state["count"] * p.grad / state["sum"]


def test_state_of_an_unknown_optimizer_and_its_numbers(tmp_path: Path) -> None:
    engine, other = make_engine(optimizer=Counting), make_engine(optimizer=Counting)
    goes_on(engine, other, tmp_path / "a")
    assert {state["count"] for state in other.optimizer.state.values()} == {4}


def test_state_that_no_file_can_hold_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    engine = make_engine(optimizer=lambda p: Counting(p, kept=[1, 2]))
    train(engine, 0, 1)
    with pytest.raises(UserError, match=r"0.weight: its state 'kept' is a list"):
        engine.save(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_combined_optimizers(tmp_path: Path) -> None:
    def make(parameters: Any) -> CombinedOptimizer:
        given = list(parameters)
        muon = torch.optim.Muon([p for p in given if p.dim() == 2], lr=1e-2)
        return CombinedOptimizer(
            [muon, torch.optim.SGD([p for p in given if p.dim() != 2], lr=0.1, momentum=0.9)]
        )

    goes_on(make_engine(optimizer=make), make_engine(optimizer=make), tmp_path / "a")
    with pytest.raises(
        UserError, match=r"momentum_buffer of 0.weight and 3 more, and the optimizer here, AdamW"
    ):
        make_engine().load(tmp_path / "a")


# What modules keep for themselves.


class Remembering(nn.Module):
    """Has extra state, and a buffer that no state dict has."""

    seen: Tensor

    def __init__(self, kind: type = dict) -> None:
        super().__init__()
        self.layer, self.kind, self.calls = nn.Linear(4, 2), kind, 0
        self.register_buffer("seen", torch.zeros(2), persistent=False)
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def get_extra_state(self) -> Any:
        return (
            torch.tensor(self.calls)
            if self.kind is Tensor
            else {"calls": self.calls}
            if self.kind is dict
            else {1}
        )

    def set_extra_state(self, state: Any) -> None:
        self.calls = int(state if isinstance(state, Tensor) else state["calls"])

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        return self.layer(x) + self.seen.sum()


@pytest.mark.parametrize("kind", [dict, Tensor])
def test_extra_state_and_changed_temporary_buffers_come_back(kind: type, tmp_path: Path) -> None:
    model = Remembering(kind)
    engine = make_engine(model)
    path = saved(engine, tmp_path / "a")
    calls, seen = model.calls, model.seen.clone()
    other = Remembering(kind)
    loaded = make_engine(other)
    loaded.load(path)
    assert other.calls == calls > 1
    assert torch.equal(other.seen, seen)
    assert seen.sum() > 1


class Sparse(nn.Module):
    """Reads two sparse buffers, which checkpoints cannot have, and changes one."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(4, 2), change
        for name in ("fixed", "changing"):
            self.register_buffer(name, torch.eye(2).to_sparse(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.change == "in place":
            self.changing.mul_(0.5)
        elif self.change == "anew":
            self.changing = self.changing * 0.5
        mixed = self.layer(x).T
        return (torch.sparse.mm(self.fixed.to(x.dtype), mixed) + self.changing.to(x.dtype) @ mixed).T


@pytest.mark.parametrize("change", ["in place", "anew"])
def test_changed_sparse_buffers_are_said_not_to_be_saved(change: str, tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match="^changing: sparse buffers have changed and are not in the checkpoint"
    ):
        saved(make_engine(Sparse(change)), tmp_path / "a")


def test_sparse_buffers_that_stay_as_they_are_need_no_word(tmp_path: Path) -> None:
    saved(make_engine(Sparse("never")), tmp_path / "a")


def test_extra_state_that_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"_extra_state: get_extra_state\(\) of Remembering returns a set"):
        saved(make_engine(Remembering(set)), tmp_path / "a")


class Drawing(nn.Module):
    """Draws from torch's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.dropout(x, 0.5, self.training))


def test_random_state_comes_back_where_nothing_is_seeded(tmp_path: Path) -> None:
    goes_on(make_engine(Drawing(), seed=None), make_engine(Drawing(), seed=None), tmp_path / "a")


def test_another_seed_is_told(tmp_path: Path) -> None:
    path = saved(make_engine(seed=1), tmp_path / "a")
    with pytest.warns(UserWarning, match="was saved with seed=1, and this engine has seed=2: random numbers"):
        make_engine(seed=2).load(path)
    with pytest.warns(UserWarning, match="was saved with seed=1, and this engine has seed=None"):
        make_engine(seed=None).load(path)


def test_state_of_the_engine_that_no_engine_saves_is_refused_in_words(tmp_path: Path) -> None:
    """Bytes of a stranger, with the right hashes, where an engine expects its own."""
    engine = make_engine()
    engine.step(batch(0))
    engine.save(tmp_path / "a")
    manifest = SavedState.open(tmp_path / "a").manifest
    (piece,) = manifest.tensors["(learned)"]["rank 0"].pieces
    path = tmp_path / "a" / piece.file
    data = bytearray(path.read_bytes())
    begin = read_header(path)[piece.tensor].begin
    data[begin] = 255
    path.write_bytes(data)
    changed = dataclasses.replace(manifest, files={piece.file: record_of(path)})
    (tmp_path / "a" / MANIFEST).write_bytes(changed.as_bytes())
    with pytest.raises(UserError, match=r"\(learned\) is not what an engine saves"):
        engine.load(tmp_path / "a")
    engine.close()
