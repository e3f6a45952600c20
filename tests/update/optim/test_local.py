"""The user's optimizer over the parts of parameters that a rank holds."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon import parallelize
from echelon.errors import UserError
from echelon.update.optim import CombinedOptimizer
from echelon.update.optim.local import (
    FirstState,
    FirstStates,
    Make,
    _begins_alike,
    begin_like,
    make_local,
    make_whole,
)
from echelon.update.optim.optimizer_state import check_gradient, state_forms


def grouped(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """As users write it: matrices are decayed, vectors are not."""
    every = list(parameters)
    return torch.optim.AdamW(
        [
            {"params": [p for p in every if p.dim() > 1], "weight_decay": 0.5},
            {"params": [p for p in every if p.dim() == 1], "weight_decay": 0.0},
        ]
    )


def test_rules_see_the_parameters_and_the_groups_hold_the_parts() -> None:
    matrix, vector, elsewhere = (nn.Parameter(torch.ones(shape)) for shape in ((4, 2), (4,), (2, 2)))
    parts = {matrix: [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))], vector: [vector]}
    optimizer = make_local(grouped([matrix, vector, elsewhere]), parts)
    decayed, plain = optimizer.param_groups
    assert [id(p) for p in decayed["params"]] == [id(part) for part in parts[matrix]], "flat, but a matrix's"
    assert [id(p) for p in plain["params"]] == [id(vector)]
    for part in (*parts[matrix], vector):
        part.grad = torch.zeros_like(part)
    optimizer.step()
    assert {id(p) for p in optimizer.state} == {id(part) for part in (*parts[matrix], vector)}


def matrices_alone(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in parameters if p.dim() == 2])


@pytest.mark.parametrize("make", [torch.optim.SGD, matrices_alone])
def test_a_stage_without_parameters_has_an_optimizer_that_does_nothing(make: Make) -> None:
    optimizer = make_local(make_whole(make, []), {})
    assert [group["params"] for group in optimizer.param_groups] == [[]]
    optimizer.step()


def with_state(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer that makes its state at once, of whole parameters."""
    return torch.optim.Adagrad(parameters)


def test_state_of_whole_parameters_is_forgotten() -> None:
    whole = [nn.Parameter(torch.ones(2))]
    assert with_state(whole).state
    assert not make_local(with_state(whole), {}).state


class Eager(torch.optim.Optimizer):
    """Adagrad as torch 2.11 has it: state is made here, and nowhere else."""

    needs = "element"

    def __init__(self, params: Any, lr: float = 0.1, start: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "start": start})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"step": torch.tensor(0.0), "calls": 0, "sum": torch.full_like(p, start)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state, gradient = self.state[p], p.grad.to_dense()
                    state["step"] += 1
                    state["sum"].addcmul_(gradient, gradient)
                    p.addcdiv_(gradient, state["sum"].sqrt() + 1e-10, value=-group["lr"])


class Anchored(Eager):
    """Its state is of single elements, and differs between them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.defaults.clear()
        for p, state in self.state.items():
            state["sum"] = p.detach().clone()


def make(parameters: Any) -> torch.optim.Optimizer:
    return Eager(parameters, start=0.1)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.arange(float(torch.Size(shape).numel())).reshape(shape).to(dtype))


@pytest.mark.parametrize("shape", [(2, 3), ()])
def test_a_part_begins_as_the_parameter_does(shape: tuple[int, ...]) -> None:
    """In its own precision: bf16 would have rounded 0.1."""
    whole, part = parameter(*shape, dtype=torch.bfloat16), parameter(4)
    optimizer = make_local(make([whole]), {whole: [part]})
    assert not optimizer.state, "it may have no memory yet"
    part.grad = torch.ones(4)
    optimizer.step()
    state = optimizer.state[part]
    assert torch.equal(state["sum"], torch.full((4,), 0.1) + 1)
    assert state["step"] == 1
    assert state["calls"] == 0
    assert list(optimizer.state) == [part]


def test_a_state_that_is_forgotten_begins_again() -> None:
    whole, part = parameter(2), parameter(2)
    optimizer = make_local(make([whole]), {whole: [part]})
    for _ in range(2):
        part.grad = torch.ones(2)
        optimizer.step()
        assert torch.equal(optimizer.state.pop(part)["sum"], torch.full((2,), 1.1))


def test_each_of_several_optimizers_begins_its_own_way() -> None:
    first, second, parts = parameter(2), parameter(3), (parameter(2), parameter(3))

    def both(_: Any) -> torch.optim.Optimizer:
        return CombinedOptimizer([Eager([first], start=1.0), Eager([second], start=2.0)])

    optimizer = make_local(both([first, second]), {first: [parts[0]], second: [parts[1]]})
    for part in parts:
        part.grad = torch.zeros_like(part)
    optimizer.step()
    assert [optimizer.state[part]["sum"].tolist() for part in parts] == [[1.0] * 2, [2.0] * 3]


def test_a_copy_of_the_optimizer_begins_alike() -> None:
    whole, part = parameter(2), parameter(2)
    copy = deepcopy(make_local(make([whole]), {whole: [part]}))
    (copied,) = copy.param_groups[0]["params"]
    copied.grad = torch.ones(2)
    copy.step()
    assert torch.equal(copy.state[copied]["sum"], torch.full((2,), 1.1))


def test_state_that_differs_between_elements_is_nobody_s_to_make() -> None:
    whole, part = parameter(2), parameter(2)
    optimizer = make_local(Anchored([whole]), {whole: [part]})
    part.grad = torch.ones(2)
    with pytest.raises(KeyError, match="step"):
        optimizer.step()


def test_what_looks_at_the_optimizer_leaves_no_state() -> None:
    whole, part = parameter(2, 2), parameter(2, 2)
    optimizer = make_local(torch.optim.Adagrad([whole]), {whole: [part]})
    forms = state_forms(optimizer, part)
    assert forms is not None
    assert {key: tuple(form.shape) for key, form in forms.items()} == {"step": (), "sum": (1, 1)}
    optimizer = make_local(make([whole]), {whole: [part]})
    check_gradient(optimizer, "w", part, torch.ones(2, 2).to_sparse())
    assert not optimizer.state


@pytest.mark.parametrize(
    ("plan", "tolerance"),
    [("precision=fp32", 1e-6), ("precision=bf16", 1e-2), ("offload=optimizer precision=fp32", 1e-6)],
)
def test_an_engine_trains_with_it(plan: str, tolerance: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    expected, batch = deepcopy(model), (torch.ones(4, 3), torch.zeros(4, 2))
    with parallelize(model, plan, optimizer=make, loss=F.mse_loss, audit="off") as engine:
        engine.step(batch)
        trained: dict[str, Tensor] = engine.full_state_dict()
    optimizer = make(expected.parameters())
    F.mse_loss(expected(batch[0]), batch[1]).backward()
    optimizer.step()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(trained[name].float(), value, rtol=tolerance, atol=tolerance)


TOUCHES: dict[str, Callable[[FirstStates, Tensor], object]] = {
    "read": lambda states, tensor: states[tensor],
    "written": lambda states, tensor: states.__setitem__(tensor, {}),
    "deleted": lambda states, tensor: states.__delitem__(tensor),
    "asked": lambda states, tensor: tensor in states,
    "gone over": lambda states, _: [*states],
    "counted": lambda states, _: len(states),
    "joined": lambda states, tensor: states.__ior__({tensor: {}}),
    "got": lambda states, tensor: states.get(tensor),
    "keys": lambda states, _: states.keys(),
    "values": lambda states, _: states.values(),
    "items": lambda states, _: states.items(),
    "popped": lambda states, tensor: states.pop(tensor),
    "last popped": lambda states, _: states.popitem(),
    "cleared": lambda states, _: states.clear(),
    "updated": lambda states, tensor: states.update({tensor: {}}),
    "set once": lambda states, tensor: states.setdefault(tensor, {}),
}


@pytest.mark.parametrize("touch", TOUCHES)
def test_nobody_touches_state_while_an_update_is_under_way(touch: str) -> None:
    tensor, states = parameter(2), FirstStates()
    states[tensor] = {"step": 1}

    class UnderWayError(Exception):
        pass

    def wait() -> None:
        raise UnderWayError

    states.before_read = wait
    with pytest.raises(UnderWayError):
        TOUCHES[touch](states, tensor)
    states.before_read = None
    assert {**states} == {tensor: {"step": 1}}
    TOUCHES[touch](states, tensor)


def test_state_that_is_loaded_is_kept_where_it_is_watched() -> None:
    whole, part = parameter(2), parameter(2)
    optimizer = make_local(torch.optim.Adam([whole]), {whole: [part]})
    part.grad = torch.ones(2)
    optimizer.step()
    states, saved = optimizer.state, deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"].fill_(7.0)
    optimizer.load_state_dict(saved)
    assert optimizer.state is states
    assert states[part]["exp_avg"].tolist() == [7.0, 7.0]


def test_state_is_read_when_no_update_is_under_way() -> None:
    states, tensor = FirstStates(), parameter(2)
    states[tensor] = {"step": 1}
    calls: list[int] = []
    states.before_read = lambda: calls.append(1)
    assert states[tensor] == states.get(tensor) == {"step": 1}
    assert list(states.values()) == [{"step": 1}]
    assert list(states.items()) == [(tensor, {"step": 1})]
    assert len(calls) == 4
    assert states.get(parameter(3), 7) == 7
    states.before_read = None
    assert states[tensor] == {"step": 1}


@pytest.mark.parametrize(
    "use",
    [
        lambda states, replaced: states[replaced],
        lambda states, replaced: states.get(replaced),
        lambda states, replaced: states.__setitem__(replaced, {}),
    ],
)
def test_a_parameter_that_others_are_updated_for_has_no_state(use: Any) -> None:
    states, replaced = FirstStates(), parameter(2)
    states.replaced = frozenset({replaced})
    with pytest.raises(UserError, match=r"optimizer.state of a parameter of shape \(2,\): in its place"):
        use(states, replaced)


def test_a_state_that_begins_is_made_once_and_is_its_own() -> None:
    tensor = parameter(2, 3, dtype=torch.float64)
    states, step = FirstStates(), torch.tensor(4.0)
    states.first[tensor] = FirstState({"sum": torch.tensor(0.5)}, {"step": step, "calls": 2})
    made = states[tensor]
    assert states[tensor] is made
    assert (made["sum"].shape, made["sum"].dtype, made["calls"]) == ((2, 3), torch.float32, 2)
    assert bool((made["sum"] == 0.5).all())
    made["step"] += 1
    assert step == 4, "that of others begins as this one did"
    assert states[parameter(1)] == {}
    begun = begin_like(states, small := parameter(1), tensor)
    assert begun[small]["sum"].tolist() == [0.5]
    assert begin_like(states, small, parameter(9))[small] == {}
    assert begin_like({}, small, tensor)[small] == {}


@pytest.mark.parametrize(
    ("made", "small", "whole", "is_alike"),
    [
        (1, 1, None, True),
        (1, 2, None, False),
        ("a", "a", None, False),
        (torch.tensor(2.0), torch.tensor(2.0), None, True),
        (torch.tensor([2.0]), torch.tensor(2.0), None, False),
        (torch.full((2, 3), 0.5), torch.tensor(0.5), torch.zeros(2, 3), True),
        (torch.full((3, 2), 0.5), torch.tensor(0.5), torch.zeros(2, 3), False),
        (torch.tensor([0.5, 0.25]), torch.tensor(0.5), torch.zeros(2), False),
        (
            torch.full((2,), 0.1, dtype=torch.float64),
            torch.tensor(0.1, dtype=torch.float64),
            torch.zeros(2),
            True,
        ),
        (None, None, None, True),
    ],
)
def test_what_begins_alike(made: Any, small: Any, whole: Tensor | None, is_alike: bool) -> None:
    assert _begins_alike(made, small, whole) is is_alike
