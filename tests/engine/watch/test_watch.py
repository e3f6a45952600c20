"""What an engine does with changes by hand, beyond tests/foreign/test_hands.py: float32 masters, calls
outside of a step, ranks that do different things."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.engine import parallelize
from echelon.errors import UserError
from tests.cases import adamw
from tests.foreign.hands import ByMode, stack, vectors

WIDTH = 8


def make(kind: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return stack().to(kind)


def batch(step: int, kind: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    values, targets = vectors(step)
    return values.to(kind), targets.to(kind)


def refusal(call: Any) -> str:
    try:
        call()
    except UserError as error:
        return str(error)
    return ""


# Float32 masters.


def change(model: nn.Module, way: str) -> None:
    """Clamps most elements away, and leaves some as they are."""
    for parameter in model.parameters():
        if way == "in place":
            with torch.no_grad():
                parameter.clamp_(-0.1, 0.1)
        elif way == "data":
            parameter.data.clamp_(-0.1, 0.1)
        else:
            parameter.data = parameter.data.clamp(-0.1, 0.1)


def plain_masters(way: str) -> list[Tensor]:
    """By hand: bf16 weights, and masters that take the elements which the user has changed."""
    model = make(torch.bfloat16)
    masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer = adamw(masters)
    for step in range(3):
        values, targets = batch(step)
        model.zero_grad()
        F.mse_loss(model(values.bfloat16()).float(), targets).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        change(model, way)
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                is_changed = parameter != master.bfloat16()
                master[is_changed] = parameter[is_changed].float()
    return [parameter.detach().float() for parameter in model.parameters()]


def train_with_masters(plan: str, way: str) -> list[Tensor]:
    model = make(torch.float32)
    engine = parallelize(model, f"{plan} precision=bf16", optimizer=adamw, loss=F.mse_loss, audit="off")
    for step in range(3):
        engine.step(engine.local(batch(step)))
        change(model, way)
    return [value.float() for value in engine.full_state_dict().values()]


@pytest.mark.parametrize("way", ["in place", "data", "other memory"])
@pytest.mark.parametrize("plan", ["data=1", "data=1 offload=optimizer"])
def test_masters_take_what_the_user_has_changed(plan: str, way: str) -> None:
    for trained, expected in zip(train_with_masters(plan, way), plain_masters(way), strict=True):
        torch.testing.assert_close(trained, expected, rtol=2**-7, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", ["data=2", "data=2 zero=1", "data=2 zero=2", "data=2 zero=1 offload=optimizer"]
)
def test_masters_of_several_ranks_do_too(plan: str, warm_ranks: Any) -> None:
    for weights in warm_ranks(2).run(train_with_masters, plan, "other memory"):
        for trained, expected in zip(weights, plain_masters("other memory"), strict=True):
            torch.testing.assert_close(trained, expected, rtol=2**-7, atol=2e-3)


# The model outside of a step.


def call_outside(plan: str) -> tuple[Tensor | str, str, str, str]:
    """The output of the model, and what state_dict, optimizer.step and a leftover clip say."""
    model = make()
    engine = parallelize(
        model,
        f"{plan} precision=fp64",
        optimizer=adamw,
        loss=F.mse_loss,
        tensor_table={"0": "column", "2": "row", "4": "replicated"},
    )
    engine.step(engine.local(batch(0, torch.float64)))
    weights = engine.full_state_dict()
    values = batch(1, torch.float64)[0]
    with torch.no_grad():
        output: Any = ""
        text = refusal(lambda: model(values))
        if not text:
            whole = make()
            whole.load_state_dict(weights)
            output = (model(values) - whole(values)).abs().max()
    update = refusal(engine.optimizer.step)
    clip = refusal(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    state = refusal(model.state_dict)
    engine.step(engine.local(batch(1, torch.float64)))  # it goes on
    return text or output, state, update, clip


# Whether the model can be called, and whether it has all of its state.
OUTSIDE = {
    "data=1": (True, True, True),
    "data=2": (True, True, True),
    "data=2 zero=1": (True, True, False),
    "data=2 zero=3": (True, False, False),
    "tensor=2": (True, False, False),
    "pipeline=2 microbatches=2": (False, False, False),
    "data=1 offload=parameters": (True, False, False),
    "data=1 offload=optimizer": (True, True, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("plan", OUTSIDE)
def test_calls_outside_of_a_step_are_right_or_refused(plan: str, warm_ranks: Any) -> None:
    is_called, has_state, has_gradients = OUTSIDE[plan]
    ranks = 1 if "data=1" in plan else 2
    for output, state, update, clip in warm_ranks(ranks).run(call_outside, plan):
        if is_called:
            assert float(output) < 1e-12
        else:
            assert "outside of a step" in str(output)
        assert state == "" if has_state else ("engine.full_state_dict()" in state)
        assert (update == "") == (plan == "data=1")
        assert clip == "" if has_gradients else ("parallelize(clip=…)" in clip)


# Ranks that do different things.


def differ(what: str) -> tuple[str, bool]:
    model = make()
    engine = parallelize(
        model, "data=2 precision=fp64", optimizer=adamw, loss=F.mse_loss, audit="first"
    )  # of the second step it would tell first
    engine.step(engine.local(batch(0, torch.float64)))
    before = engine.full_state_dict()
    if what == "noise":
        torch.manual_seed(engine.replica)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
    elif engine.replica == 0:
        model.eval()
    text = refusal(lambda: engine.step(engine.local(batch(1, torch.float64))))
    is_same = all(torch.equal(before[name], value) for name, value in engine.full_state_dict().items())
    return text, is_same


@pytest.mark.parametrize("what", ["noise", "mode"])
def test_changes_that_differ_between_ranks_are_refused_by_all(what: str, warm_ranks: Any) -> None:
    for text, is_same in warm_ranks(2).run(differ, what):
        assert "not alike on every rank" in text
        assert is_same or what == "noise"


# Modes, and structure.


def test_a_step_leaves_modes_alone() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), ByMode()).eval()
    engine = parallelize(model, "data=1", optimizer=adamw, loss=F.mse_loss, audit="off")
    assert model.training, "parallelize trains"
    model.eval()
    engine.step(batch(0))
    assert not model.training
    assert not model[1].training


def test_an_evaluation_between_does_not_hide_a_change() -> None:
    model = make()
    engine = parallelize(model, "data=1 microbatches=2 precision=fp64", optimizer=adamw, loss=F.mse_loss)
    engine.step(batch(0, torch.float64))
    model[1].register_forward_hook(lambda _m, _a, output: output - output.mean(0))
    engine.evaluate(batch(1, torch.float64))
    assert "module 1 has got a hook" in refusal(lambda: engine.step(batch(1, torch.float64)))


def test_an_optimizer_that_says_what_it_needs_may_have_hooks(warm_ranks: Any) -> None:
    texts = warm_ranks(2).run(train_with_hook)
    assert texts == ["", ""]


def train_with_hook() -> str:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = adamw(parameters)
        made.register_step_pre_hook(lambda *_: None)
        made.needs = "element"  # type: ignore[attr-defined]
        return made

    return refusal(lambda: parallelize(make(), "data=2 zero=1", optimizer=optimizer, loss=F.mse_loss))


def repair() -> list[str]:
    """One rank sees a hook on its stage's weight, in a step that is audited, and takes it away again."""
    model = make()
    with parallelize(
        model, "pipeline=2 microbatches=2 precision=fp64", optimizer=adamw, loss=F.mse_loss, audit="always"
    ) as engine:
        said, handle = [], None
        if engine.mesh.rank == 1:
            handle = list(model.parameters())[-1].register_hook(lambda gradient: gradient * 2)
        for step in range(2):
            said.append(refusal(lambda step=step: engine.step(engine.local(batch(step, torch.float64)))))
            if handle is not None:
                handle.remove()
        return said


def test_a_step_after_a_repair_is_made(warm_ranks: Any) -> None:
    for first, second in warm_ranks(2).run(repair):
        assert "has got a hook" in first
        assert second == ""
