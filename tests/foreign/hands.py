"""Trainings in which the user does something by hand between two steps, or whose model or optimizer has parts
that are tied in ways that torch does not know of."""

from collections import defaultdict, deque
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.cases import adamw
from tests.foreign.proof import Foreign

WIDTH, SAMPLES = 8, 4


def vectors(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(700 + step)
    values = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return values, torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)


def stack() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Dropout(0.0), nn.Linear(16, WIDTH)
    )


# B: begins later.


def _add_centring_hook(model: nn.Module, _: Any, step: int) -> None:
    if step == 1:
        model[2].register_forward_hook(lambda _m, _a, output: output - output.mean(0))


def _add_weight_hook(model: nn.Module, _: Any, step: int) -> None:
    if step == 0:
        weight = dict(model.named_parameters()).get("4.weight")
        if weight is not None:
            weight.register_hook(lambda gradient: gradient / gradient.norm())


def _swap_activation(model: nn.Module, _: Any, step: int) -> None:
    if step == 1:
        model[1] = nn.ReLU()


def _drop_layer(model: nn.Module, _: Any, step: int) -> None:
    if step == 1:
        del model[3]


def _replace_forward(model: nn.Module, _: Any, step: int) -> None:
    if step == 1:
        model[1].forward = lambda values: values - values.mean(0)


def _evaluate_mode(model: nn.Module, _: Any, step: int) -> None:
    model.train(step != 0)


def _evaluate_part(model: nn.Module, _: Any, step: int) -> None:
    model[3].train(step == 1)


def half_frozen() -> nn.Module:
    model = stack()
    model[0].requires_grad_(False)
    return model


def _unfreeze(model: nn.Module, _: Any, step: int) -> None:
    if step == 1:
        model[0].requires_grad_(True)


def dropping() -> nn.Module:
    """Its activation is another one in evaluation."""
    return nn.Sequential(nn.Linear(WIDTH, 16), ByMode(), nn.Linear(16, 16), ByMode(), nn.Linear(16, WIDTH))


class ByMode(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values.tanh() if self.training else values.relu()


LATE: dict[str, Foreign] = {
    "hook added": Foreign(stack, vectors, F.mse_loss, between=_add_centring_hook),
    "weight hook added": Foreign(stack, vectors, F.mse_loss, between=_add_weight_hook),
    "module swapped": Foreign(stack, vectors, F.mse_loss, between=_swap_activation),
    "module dropped": Foreign(stack, vectors, F.mse_loss, between=_drop_layer),
    "forward replaced": Foreign(stack, vectors, F.mse_loss, between=_replace_forward),
    "eval between steps": Foreign(dropping, vectors, F.mse_loss, between=_evaluate_mode),
    "part unfrozen": Foreign(half_frozen, vectors, F.mse_loss, between=_unfreeze),
    "eval of a part": Foreign(dropping, vectors, F.mse_loss, between=_evaluate_part),
}

# E: the optimizer couples parameters.


def _clip(optimizer: torch.optim.Optimizer, limit: float) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    torch.nn.utils.clip_grad_norm_(parameters, limit)


def _hooked(parameters: Any) -> torch.optim.Optimizer:
    optimizer = adamw(parameters)
    optimizer.register_step_pre_hook(lambda each, *_: _clip(each, 0.05))
    return optimizer


def _patched(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    plain = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        _clip(optimizer, 0.05)
        return plain(*args, **kwargs)

    optimizer.step = step  # type: ignore[method-assign]
    return optimizer


class OneRate(torch.optim.SGD):
    """One rate from the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for parameter in parameters:
            parameter.sub_(0.1 * parameter.grad / (1 + norm))


def _late_hook(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 0:
        optimizer.register_step_pre_hook(lambda each, *_: _clip(each, 0.05))


COUPLED: dict[str, Foreign] = {
    "clips in a hook": Foreign(stack, vectors, F.mse_loss, _hooked),
    "clips in step": Foreign(stack, vectors, F.mse_loss, _patched),
    "one rate": Foreign(stack, vectors, F.mse_loss, partial(OneRate, lr=0.1)),
    "hook added later": Foreign(stack, vectors, F.mse_loss, between=_late_hook),
}

# F: other memory is a weight's.


class Aliased(nn.Module):
    """`kind`: how the second matrix, or a value beside it, is the memory of the first."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        # In the type of the training: a cast would give each memory of its own.
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        self.kind = kind
        if kind == "parameter":
            self.second.weight = nn.Parameter(self.first.weight.data)
        elif kind == "buffer":
            self.register_buffer("shadow", self.first.weight.data)
        elif kind == "attribute":
            self.view = self.first.weight.data.T
        elif kind == "list":
            self.views = [self.first.weight.detach()[:4]]
        elif kind in _HELPERS:
            self.helper = _HELPERS[kind](self.first.weight.detach())

    def layers(self) -> list[nn.Module]:
        return [self.first, self.second]

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.second(self.first(values).tanh())
        if self.kind == "buffer":
            return hidden + values @ self.shadow
        if self.kind == "attribute":
            return hidden + values @ self.view
        if self.kind in _HELPERS:
            return hidden + self.helper(values)
        return hidden + (values[:, :4] @ self.views[0] if self.kind == "list" else 0.0)


class Product:
    """An object of the user's own."""

    def __init__(self, matrices: Any) -> None:
        self.matrices = matrices

    def __call__(self, values: Tensor) -> Tensor:
        return values @ self.matrices[0]


def _of_array(weight: Tensor) -> Any:
    array = weight.numpy()
    return lambda values: values @ torch.from_numpy(array)


_HELPERS: dict[str, Any] = {
    "object": lambda weight: Product([weight]),
    "closure": lambda weight: lambda values: values @ weight,
    "partial": lambda weight: partial(F.linear, weight=weight),
    "queue": lambda weight: Product(deque([weight])),
    "array": _of_array,
}


ALIASED: dict[str, Foreign] = {
    f"aliased {kind}": Foreign(partial(Aliased, kind), vectors, F.mse_loss)
    for kind in ("parameter", "buffer", "attribute", "list", *_HELPERS)
}

# G: hands between steps.


@torch.no_grad()
def _clamp(model: nn.Module, *_: Any) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.2, 0.2)


def _clamp_data(model: nn.Module, *_: Any) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def _rebind(model: nn.Module, _: Any, step: int) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9 + 0.01 * step


def _load(model: nn.Module, _: Any, step: int) -> None:
    if step == 1:
        generator = torch.Generator().manual_seed(5)
        state = {
            name: torch.randn(value.shape, generator=generator, dtype=value.dtype) * 0.3
            for name, value in stack().double().state_dict().items()
        }
        model.load_state_dict(state)


def _replace_parameter(model: nn.Module, _: Any, step: int) -> None:
    if step == 1:
        model[2].weight = nn.Parameter(torch.full((16, 16), 0.1, dtype=torch.float64))


def _forget_moments(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


def _forget_by_parameter(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for parameter in model.parameters():
        optimizer.state[parameter]["exp_avg"].mul_(0.5)


def _clear_state(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 1:
        optimizer.state.clear()


def _replace_state(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 1:
        optimizer.state = defaultdict(dict)


def _reload_state(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"] * 0.5
    optimizer.load_state_dict(saved)


def _set_options(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.01 / (1 + step), 0.2


def _add_group(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 1:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, dtype=torch.float64))]})


HANDS: dict[str, Foreign] = {
    "clamped": Foreign(stack, vectors, F.mse_loss, between=_clamp),
    "clamped data": Foreign(stack, vectors, F.mse_loss, between=_clamp_data),
    "data rebound": Foreign(stack, vectors, F.mse_loss, between=_rebind),
    "state dict loaded": Foreign(stack, vectors, F.mse_loss, between=_load),
    "parameter replaced": Foreign(stack, vectors, F.mse_loss, between=_replace_parameter),
    "moments forgotten": Foreign(stack, vectors, F.mse_loss, between=_forget_moments),
    "moments by parameter": Foreign(stack, vectors, F.mse_loss, between=_forget_by_parameter),
    "state cleared": Foreign(stack, vectors, F.mse_loss, between=_clear_state),
    "state replaced": Foreign(stack, vectors, F.mse_loss, between=_replace_state),
    "state loaded again": Foreign(stack, vectors, F.mse_loss, between=_reload_state),
    "options set": Foreign(stack, vectors, F.mse_loss, between=_set_options),
    "group added": Foreign(stack, vectors, F.mse_loss, between=_add_group),
}

# H: an auxiliary loss kept on a module of another stage.


class Penalty(nn.Module):
    """A layer that keeps something for the loss, as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(WIDTH, WIDTH), kind
        self.rows: Tensor | None = None
        if kind == "none":
            self.auxiliary: Tensor | None = None
        elif kind == "zero":
            self.auxiliary = torch.zeros(())
        elif kind == "float":
            self.auxiliary = 0.0  # type: ignore[assignment]
        elif kind == "list":
            self.losses: list[Tensor] = []

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.layer(values).tanh()
        self.rows = hidden.pow(2).mean(1, keepdim=True)
        penalty = self.rows.mean()
        if self.kind == "list":
            self.losses[:] = [penalty]
        else:
            self.auxiliary = penalty
        return hidden


class WithPenalty(nn.Sequential):
    """Its loss reads what its first layer keeps: `loss` is made with the model."""

    def __init__(self, kind: str) -> None:
        super().__init__(Penalty(kind), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        _models.append(self)


_models: list[WithPenalty] = []  # the last one is that which is trained: a loss has no other way to it


def penalised(output: Tensor, targets: Tensor) -> Tensor:
    first: Any = _models[-1][0]
    auxiliary = sum(first.losses) if first.kind == "list" else first.auxiliary
    return F.mse_loss(output, targets) + 0.1 * auxiliary


class ReadsNeighbour(nn.Module):
    """A layer that reads what another one has left."""

    def __init__(self, other: Penalty) -> None:
        super().__init__()
        self.layer, self._other = nn.Linear(WIDTH, WIDTH), [other]

    def forward(self, values: Tensor) -> Tensor:
        return self.layer(values) * (1 + self._other[0].rows)


def neighbours() -> nn.Module:
    first = Penalty("none")
    return nn.Sequential(first, nn.Linear(WIDTH, WIDTH), ReadsNeighbour(first), nn.Linear(WIDTH, WIDTH))


KEPT: dict[str, Foreign] = {
    **{
        f"auxiliary {kind}": Foreign(partial(WithPenalty, kind), vectors, penalised)
        for kind in ("none", "zero", "float", "list")
    },
    "read by a layer": Foreign(neighbours, vectors, F.mse_loss),
}
