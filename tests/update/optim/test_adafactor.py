"""Adafactor against torch's, whole and in parts."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from echelon.errors import UserError
from echelon.update.optim import SM3, Adafactor
from tests.reads import no_reads
from tests.update.optim.parts import (
    InParts,
    random_gradients,
    random_parameters,
    set_gradients,
    state_bytes,
    worst,
)

SHAPES = [(4, 6), (7,), (), (2, 3, 4), (1, 5), (5, 1), (2, 3, 3, 2)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 0.3, "beta2_decay": -0.5, "d": 1.5, "weight_decay": 0.1},
    {"eps": (1e-2, 0.5), "maximize": True},
    {"lr": 1.0, "eps": (None, 1e-3)},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_it_is_torch_s(options: dict[str, Any]) -> None:
    ours, theirs = random_parameters(SHAPES), random_parameters(SHAPES)
    optimizer, reference = Adafactor(ours, **options), torch.optim.Adafactor(theirs, **options)
    for step in range(20):
        gradients = random_gradients(ours, step)
        set_gradients(ours, gradients)
        set_gradients(theirs, gradients)
        optimizer.step()
        reference.step()
    assert worst(ours, theirs) < 1e-12
    for one, other in zip(ours, theirs, strict=True):
        assert optimizer.state[one].keys() == reference.state[other].keys()
        for key, value in reference.state[other].items():
            assert optimizer.state[one][key].shape == value.shape
            assert torch.allclose(optimizer.state[one][key], value.double(), rtol=0, atol=1e-12), key


@pytest.mark.parametrize("cuts", [(), (8,), (1, 9, 11, 13), tuple(range(40))])
def test_parts_are_updated_as_the_whole(cuts: tuple[int, ...]) -> None:
    options = {"lr": 0.3, "d": 1.1, "weight_decay": 0.1}
    whole = random_parameters(SHAPES)
    in_parts = InParts(Adafactor, whole, cuts, **options)
    optimizer = Adafactor(whole, **options)
    for step in range(8):
        gradients = random_gradients(whole, step)
        set_gradients(whole, gradients)
        optimizer.step()
        in_parts.step(gradients)
    assert worst(in_parts.values(), whole) < 1e-12
    for runs, parameter in zip(in_parts.runs, whole, strict=True):
        for key in ("row_var", "col_var") if parameter.dim() > 1 else ():
            for run in runs:
                state = in_parts.optimizer.state[run][key]
                assert torch.allclose(state, optimizer.state[parameter][key], rtol=1e-12), "whole on each"


def test_its_state_is_small() -> None:
    matrix = nn.Parameter(torch.randn(1024, 1024))
    matrix.grad = torch.randn(1024, 1024)
    ours, adamw = Adafactor([matrix]), torch.optim.AdamW([matrix])
    ours.step()
    adamw.step()
    assert state_bytes(ours) <= 0.01 * state_bytes(adamw)


@pytest.mark.parametrize("refused", [0, 2])
def test_scale_and_skip_come_on_the_device(refused: int) -> None:
    ours, plain = random_parameters(SHAPES, torch.float32), random_parameters(SHAPES, torch.float32)
    optimizer, reference = Adafactor(ours, weight_decay=0.1), Adafactor(plain, weight_decay=0.1)
    for step in range(6):
        gradients = random_gradients(plain, step)
        set_gradients(ours, [None if g is None else 4 * g for g in gradients])
        optimizer.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
        optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
        if step == refused:  # refused: gradients may be anything
            before = (
                copy.deepcopy([p.detach() for p in ours]),
                {p: copy.deepcopy(state) for p, state in optimizer.state.items()},
            )
            set_gradients(ours, [torch.full_like(p, float("nan")) for p in ours])
            optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
            optimizer.step()
            assert all(map(torch.equal, ours, before[0]))
            for parameter, state in optimizer.state.items():
                known = {key: torch.zeros_like(value) for key, value in state.items()}
                known |= before[1].get(parameter, {})
                assert all(torch.equal(state[key], value) for key, value in known.items())
            continue
        set_gradients(plain, gradients)
        optimizer.step()
        reference.step()
    assert worst(ours, plain) < 1e-6


@pytest.mark.parametrize("refused", [0, 1])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_an_update_that_is_refused_changes_nothing_also_without_eps(value: float, refused: int) -> None:
    """In fp16 a first step that overflows is normal: then all averages are 0, and V has no least."""
    parameters = random_parameters([(4, 6), (7,)], torch.float32)
    parameters[0].data.mul_(1e20)  # whose square is infinite
    optimizer = Adafactor(parameters, eps=(0.0, 1e-3), weight_decay=0.1)
    for step in range(refused + 1):
        before = copy.deepcopy([p.detach() for p in parameters])
        averages = copy.deepcopy([list(state.values()) for state in optimizer.state.values()])
        is_refused = step == refused
        set_gradients(parameters, [torch.full_like(p, value if is_refused else 1.0) for p in parameters])
        optimizer.found_inf = torch.tensor(float(is_refused))  # type: ignore[attr-defined]
        optimizer.step()
    assert all(map(torch.equal, parameters, before))
    after = [list(state.values()) for state in optimizer.state.values()]
    known = averages or [[torch.zeros_like(each) for each in of_one] for of_one in after]
    for one, other in zip(after, known, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("types", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_the_type_of_one_parameter_is_not_that_of_another(types: tuple[torch.dtype, ...]) -> None:
    """torch takes eps[0]=None for that of the first one's type, for its whole group; here each has its own,
    as in groups of one type each."""
    gradients = [1e-3 * torch.randn(4, 4, generator=torch.Generator().manual_seed(7)).to(t) for t in types]
    ours, theirs = ([nn.Parameter(torch.ones(4, 4, dtype=t)) for t in types] for _ in range(2))
    set_gradients(ours, gradients)
    set_gradients(theirs, gradients)
    options = {"lr": 0.1, "weight_decay": 0.1}
    Adafactor(ours, **options).step()
    torch.optim.Adafactor([{"params": [p]} for p in theirs], **options).step()
    for one, other in zip(ours, theirs, strict=True):
        assert not torch.equal(one, torch.ones(4, 4))
        assert torch.allclose(one, other, rtol=torch.finfo(one.dtype).eps)


@pytest.mark.parametrize("kind", [Adafactor, SM3])
@pytest.mark.parametrize("with_flags", [False, True])
def test_a_rate_on_the_device_is_not_read(kind: Any, with_flags: bool) -> None:
    ours, plain = random_parameters(SHAPES, torch.float32), random_parameters(SHAPES, torch.float32)
    optimizer = kind(ours, lr=torch.tensor(0.25), weight_decay=0.1)
    reference = kind(plain, lr=0.25, weight_decay=0.1)
    for step in range(3):
        set_gradients(ours, random_gradients(plain, step))
        set_gradients(plain, random_gradients(plain, step))
        if with_flags:
            optimizer.found_inf = torch.tensor(0.0)
        with no_reads():
            optimizer.step()
        reference.step()
    assert worst(ours, plain) < 1e-6


def test_gradients_of_the_user_s_own_are_left_as_they_are() -> None:
    parameters = random_parameters(SHAPES)
    gradients = [torch.ones_like(p) for p in parameters]
    set_gradients(parameters, gradients)
    Adafactor(parameters).step()
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, gradients, strict=True))


def test_groups_may_get_parameters_and_state_may_be_loaded() -> None:
    first, second = random_parameters([(3, 4), (2, 5)])
    optimizer = Adafactor([first])
    set_gradients([first, second], [torch.ones(3, 4).double(), torch.ones(2, 5).double()])
    optimizer.step()
    optimizer.add_param_group({"params": [second]})
    optimizer.step()
    assert len(optimizer.state) == 2
    loaded = Adafactor([first, second])
    loaded.load_state_dict(Adafactor.state_dict(_one_group(optimizer)))
    again = copy.deepcopy(loaded)
    for each in (loaded, again):
        each.step()
    assert [float(state["step"]) for state in loaded.state.values()] == [3, 2]


def _one_group(optimizer: Adafactor) -> Adafactor:
    optimizer.param_groups = [
        optimizer.param_groups[0] | {"params": [p for g in optimizer.param_groups for p in g["params"]]}
    ]
    return optimizer


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UserError, match=r"shape \(5, 3\) has a sparse gradient.*sparse=False"):
        Adafactor(table.parameters()).step()


def test_all_errors_of_its_options_are_told_at_once() -> None:
    with pytest.raises(UserError) as refusal:
        Adafactor([nn.Parameter(torch.ones(1))], lr=-1.0, beta2_decay=1.0, eps=(-1.0, -1.0), d=0.5)
    assert len(refusal.value.errors) == 5


def test_the_least_and_the_largest_options() -> None:
    parameters = random_parameters([(2, 2)])
    least = {"lr": 0.0, "beta2_decay": 0.0, "eps": (0.0, 0.0), "d": 1.0, "weight_decay": 0.0}
    optimizer = Adafactor(parameters, **least)
    assert {key: optimizer.defaults[key] for key in least} == least
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"lr": -0.1}, "lr"),
        ({"beta2_decay": 0.1}, "beta2_decay"),
        ({"eps": (-1.0, 0.0)}, "eps[0]"),
        ({"eps": (None, -1.0)}, "eps[1]"),
        ({"d": 0.9}, "d"),
        ({"weight_decay": -0.1}, "weight_decay"),
    ]
    for options, name in wrong:
        with pytest.raises(UserError) as refusal:
            Adafactor(parameters, **options)
        assert [error.partition("=")[0] for error in refusal.value.errors] == [name]


def test_what_is_not_told_is_as_torch_has_it() -> None:
    parameters = random_parameters([(2, 2)])
    ours, theirs = Adafactor(parameters).defaults, torch.optim.Adafactor(parameters).defaults
    known = ("lr", "beta2_decay", "eps", "d", "weight_decay", "maximize")
    assert [ours[key] for key in known] == [theirs[key] for key in known]


def test_the_rate_is_bounded_by_the_root_of_the_step() -> None:
    """By hand: α = max(ε₂, RMS(W)) · min(lr, 1 / √step), of a constant gradient U = 1."""
    for lr, steps, alpha in ((0.5, 1, 0.5), (9.0, 4, 0.5), (0.25, 9, 0.25)):
        (tensor,) = random_parameters([(3,)])
        optimizer = Adafactor([tensor], lr=lr, eps=(None, 0.01))
        for _ in range(steps):
            with torch.no_grad():
                tensor.fill_(2.0)
            tensor.grad = torch.ones_like(tensor)
            optimizer.step()
        assert tensor.tolist() == pytest.approx([2 - 2 * alpha] * 3, rel=1e-12)
        with torch.no_grad():
            tensor.zero_()
        tensor.grad = torch.ones_like(tensor)
        optimizer.step()
        assert tensor.tolist() == pytest.approx([-0.01 * min(lr, (steps + 1) ** -0.5)] * 3, rel=1e-12)


def test_a_large_update_is_made_smaller() -> None:
    """RMS(U) of the second update: 2 / √(1 + (4 − 1) · 2^-0.8)."""
    for d in (1.0, 1.1, 1.2, 2.0):
        (tensor,) = random_parameters([(3,)])
        optimizer = Adafactor([tensor], lr=0.1, d=d)
        for gradient in (1.0, 2.0):
            with torch.no_grad():
                tensor.fill_(1.0)
            tensor.grad = torch.full_like(tensor, gradient)
            optimizer.step()
        length = 2 / (1 + 3 * 2**-0.8) ** 0.5
        assert tensor.tolist() == pytest.approx([1 - 0.1 * length / max(1, length / d)] * 3, rel=1e-12)
