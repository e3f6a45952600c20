"""What the state of a tensor looks like, before there is any."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon import parallelize
from echelon.state.checkpoint.saved import SavedParameter, SavedState
from echelon.update.optim import SM3, Adafactor, CombinedOptimizer, optimizer_state
from echelon.update.optim.needs import inner_optimizers
from echelon.update.optim.optimizer_state import has_no_state, load_state, state_forms
from echelon.update.optim.sum_optimizer import Box, Exchange, Part, whole_box


def parameter(*shape: int, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape, dtype=dtype))


def dims(forms: object) -> dict[str, tuple[int, ...]]:
    assert isinstance(forms, dict)
    return {key: tuple(value.shape) for key, value in forms.items()}


def test_those_of_torch_are_asked() -> None:
    tensor = parameter(4, 6)
    optimizer = torch.optim.AdamW([tensor], lr=0.1)
    forms = state_forms(optimizer, tensor)
    assert dims(forms) == {"step": (), "exp_avg": (1, 1), "exp_avg_sq": (1, 1)}
    assert forms is not None
    assert {forms[key].dtype for key in ("exp_avg", "exp_avg_sq")} == {torch.float64}
    assert (dict(optimizer.state), torch.equal(tensor, torch.ones(4, 6))) == ({}, True)
    assert state_forms(torch.optim.SGD([tensor]), tensor) == {}, "what is None is no state"
    assert dims(state_forms(torch.optim.SGD([tensor], momentum=0.9), tensor)) == {"momentum_buffer": (1, 1)}


def test_the_kernel_of_each_update() -> None:
    tensor = parameter(3, dtype=torch.float32)
    for optimizer in (torch.optim.Adam([tensor]), torch.optim.Adam([tensor], fused=True)):
        forms = state_forms(optimizer, tensor, fused=True)
        assert forms is not None
        assert forms["step"].dtype == torch.float32
        assert optimizer.param_groups[0]["fused"] in (None, True), "that of the user stays"


def test_hooks_and_schedulers_of_the_user_hear_nothing() -> None:
    tensor = parameter(3)
    optimizer = torch.optim.Adam([tensor])
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert dims(state_forms(optimizer, tensor))["exp_avg"] == (1,)
    assert (calls, scheduler.last_epoch) == ([], 0)


def test_those_of_ours_say_it() -> None:
    matrix = parameter(4, 6)
    assert dims(state_forms(Adafactor([matrix]), matrix)) == {
        "step": (),
        "row_var": (1, 1),
        "col_var": (1, 1),
    }
    assert dims(state_forms(SM3([matrix], momentum=0.9), matrix)) == {
        "accumulator_0": (1, 1),
        "accumulator_1": (1, 1),
        "momentum": (1, 1),
    }


def test_of_several_the_one_that_updates_it() -> None:
    first, second, other = parameter(4, 6), parameter(3), parameter(2)
    combined = CombinedOptimizer([torch.optim.Muon([first]), torch.optim.Adam([second])])
    assert dims(state_forms(combined, first)) == {"momentum_buffer": (1, 1)}
    assert set(dims(state_forms(combined, second))) == {"step", "exp_avg", "exp_avg_sq"}
    assert state_forms(combined, other) is None
    assert inner_optimizers(combined) == combined.optimizers
    assert list(inner_optimizers(combined.optimizers[0])) == [combined.optimizers[0]]


def test_nobody_knows_that_of_others() -> None:
    tensor = parameter(3)
    assert state_forms(type("Mine", (torch.optim.Adam,), {})([tensor]), tensor) is None
    assert not has_no_state(torch.optim.Adam([tensor]), tensor)
    assert not has_no_state(SM3([tensor]), tensor)
    assert not has_no_state(SM3([tensor]), parameter(3)), "nor of another tensor"


@pytest.mark.parametrize("kind", [Adafactor, SM3])
def test_an_empty_tensor_has_none(kind: type) -> None:
    empty = parameter(0, 3)
    assert has_no_state(kind([empty]), empty)


SUMS = [partial(SM3, lr=0.1), partial(Adafactor, lr=0.1)]
SHAPE = (2, 3)


def save_after_a_step(path: Path, make: Any) -> SavedState:
    model = nn.Linear(3, 2, bias=False)
    with parallelize(model, "precision=fp32", optimizer=make, loss=F.mse_loss, audit="off") as engine:
        engine.step((torch.ones(4, 3), torch.zeros(4, 2)))
        engine.save(path)
    return SavedState.open(path)


def load(optimizer: Any, tensor: nn.Parameter, saved: SavedState) -> dict[str, Tensor]:
    of_rank = SavedParameter(saved, "weight", lambda _: [])
    load_state(optimizer, tensor, (1,), of_rank, optimizer.whole_state)
    state: dict[str, Tensor] = optimizer.state.get(tensor, {})
    return state


def exchange_of(tensor: nn.Parameter, boxes: list[Box]) -> Exchange:
    return Exchange([SHAPE], {tensor: Part(0, boxes, lambda _: [])}, (), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("make", SUMS)
@pytest.mark.parametrize("combined", [False, True])
def test_a_rank_with_padding_alone_has_no_statistics(make: Any, combined: bool, tmp_path: Path) -> None:
    """No update would change them there: they would be older than those of other ranks."""
    saved = save_after_a_step(tmp_path / "saved", make)
    for boxes, has_state in (([], False), ([whole_box(SHAPE)], True)):
        padding = nn.Parameter(torch.zeros(4))
        made = make([padding])
        optimizer = CombinedOptimizer([made]) if combined else made
        optimizer.share(exchange_of(padding, boxes))
        assert bool(load(optimizer, padding, saved)) is has_state


def test_a_rank_with_padding_alone_counts_steps_of_elementwise_optimizers(tmp_path: Path) -> None:
    """They update padding too."""
    saved = save_after_a_step(tmp_path / "saved", torch.optim.AdamW)
    padding = nn.Parameter(torch.zeros(4))
    combined = CombinedOptimizer([torch.optim.AdamW([padding]), SM3([nn.Parameter(torch.ones(1))])])
    combined.share(exchange_of(padding, []))
    assert load(combined, padding, saved)["step"] == 1


class KeptState:
    """State of a checkpoint, of one parameter that is here as a whole."""

    def __init__(self, parts: dict[str, Tensor], numbers: dict[str, float]) -> None:
        self.parts, self.numbers, self.state_parts = parts, numbers, list(parts)

    def is_by_element(self, part: str) -> bool:
        return self.parts[part].shape == SHAPE

    def fill(self, part: str, out: Tensor) -> None:
        out.copy_(self.parts[part])

    def whole(self, part: str) -> Tensor:
        return self.parts[part]


class Unknown(torch.optim.Optimizer):
    """Nobody knows what it keeps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})


def load_whole(
    optimizer: torch.optim.Optimizer, parts: dict[str, Tensor], **numbers: float
) -> dict[str, Any]:
    (weight,) = optimizer.param_groups[0]["params"]
    load_state(optimizer, weight, weight.stride(), KeptState(parts, numbers))  # type: ignore[arg-type]
    state: dict[str, Any] = optimizer.state[weight]
    return state


def test_state_of_an_optimizer_that_nobody_knows_has_the_types_that_torch_gives_it() -> None:
    kept = torch.arange(6.0, dtype=torch.float64).view(SHAPE) / 8
    counts = torch.arange(6, dtype=torch.int32).view(SHAPE)
    parts = {
        "kept": kept,
        "counts": counts,
        "rows": kept[:, 0],
        "step": torch.tensor(3.0, dtype=torch.float64),
    }
    state = load_whole(Unknown([nn.Parameter(torch.zeros(SHAPE))]), parts, seen=4)
    assert {key: value.dtype for key, value in state.items() if isinstance(value, Tensor)} == {
        "kept": torch.float32,
        "counts": torch.int32,
        "rows": torch.float32,
        "step": torch.float64,
    }
    assert torch.equal(state["kept"], kept.float())
    assert torch.equal(state["counts"], counts)
    assert torch.equal(state["rows"], kept[:, 0].float())
    assert (state["step"], state["seen"]) == (3, 4)


def test_a_number_is_a_tensor_where_the_optimizer_makes_it_one_and_the_other_way_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adamw = torch.optim.AdamW([nn.Parameter(torch.zeros(SHAPE))])
    step = load_whole(adamw, {}, step=3)["step"]
    assert (step.dtype, step.item()) == (torch.float32, 3.0)
    monkeypatch.setattr(
        optimizer_state, "state_forms", lambda *_, **__: {"step": 0, "flag": torch.tensor(True)}
    )
    state = load_whole(adamw, {"step": torch.tensor(5.0), "flag": torch.tensor(False)})
    assert type(state["step"]) is float
    assert state == {"step": 5.0, "flag": torch.tensor(False)}


def test_memory_of_state_is_used_again_if_it_has_the_form() -> None:
    adamw = torch.optim.AdamW([nn.Parameter(torch.zeros(SHAPE))])
    parts = {"exp_avg": torch.ones(SHAPE), "exp_avg_sq": torch.full(SHAPE, 2.0)}
    before = load_whole(adamw, parts, step=1)
    place = before["exp_avg"].data_ptr()
    after = load_whole(adamw, {"exp_avg": torch.full(SHAPE, 3.0), "exp_avg_sq": torch.ones(SHAPE)}, step=2)
    assert after["exp_avg"].data_ptr() == place
    assert torch.equal(after["exp_avg"], torch.full(SHAPE, 3.0))
    adamw.state[adamw.param_groups[0]["params"][0]]["exp_avg"] = torch.zeros(SHAPE).t().contiguous().t()
    turned = load_whole(adamw, parts, step=3)["exp_avg"]
    assert turned.stride() == (3, 1)
    assert torch.equal(turned, torch.ones(SHAPE))
