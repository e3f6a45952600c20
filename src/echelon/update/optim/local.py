"""The user's optimizer over the parts of parameters that this rank holds, and the state that it starts with.

The user's function gets the model's own parameters, so that rules like "decay matrices, not vectors" work.
Then each parameter in the optimizer's groups is replaced by what this rank updates of it.

torch.optim.Adagrad makes its sums in its constructor, of the parameters that it is given; that of torch 2.11
does so nowhere else. Parts get theirs from the same constructor, which is asked what it makes of a tensor of
one element. They get it when it is first needed: a part may have no memory until then.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.update.optim.needs import inner_optimizers

State = dict[str, Any]


class FirstState(NamedTuple):
    """The state of a tensor before its first update: what is the same for every element, and the rest."""

    by_element: Mapping[str, Tensor]  # one element of each
    others: Mapping[str, Any]

    def of(self, tensor: Tensor) -> State:
        """The state of a tensor that is updated."""
        made = {
            key: torch.empty_like(tensor, dtype=one.dtype, device=one.device).copy_(one)
            for key, one in self.by_element.items()
        }
        copies = {key: v.clone() if isinstance(v, Tensor) else v for key, v in self.others.items()}
        return {**made, **copies}


@final
class FirstStates(defaultdict[Tensor, State]):
    """The state of an optimizer, in which that of a tensor is made when it is asked for. The user may read
    and edit it between steps. It is that of what is updated here: a parameter of the model in whose place
    something else is updated has none, and is refused."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*(given or (dict,)))
        self.first: dict[Tensor, FirstState] = {}
        self.replaced: frozenset[Tensor] = frozenset()  # parameters in whose place others are updated
        self.before_read: Callable[[], None] | None = None  # returns when no update is under way

    def __setitem__(self, tensor: Tensor, state: State) -> None:
        self._ready()
        self._check(tensor)
        super().__setitem__(tensor, state)

    def get(self, tensor: Tensor, default: Any = None) -> Any:
        self._ready()
        self._check(tensor)
        return super().get(tensor, default)

    def take(self, others: Mapping[Tensor, State]) -> None:
        new = dict(others)
        self.clear()
        self.update(new)

    def _ready(self) -> None:
        if self.before_read is not None:
            self.before_read()

    def _check(self, tensor: Tensor) -> None:
        if tensor in self.replaced:
            raise UserError(
                f"optimizer.state of a parameter of shape {tuple(tensor.shape)}: in its place this plan "
                "updates parts, float32 masters or copies in host memory, and has their state; go over "
                "optimizer.state.values(), or read engine.full_optimizer_state()"
            )

    @torch.no_grad()
    def __missing__(self, tensor: Tensor) -> State:
        self._check(tensor)
        first = self.first.get(tensor)
        self[tensor] = {} if first is None else first.of(tensor)
        return self[tensor]

    def __reduce__(self) -> tuple[Any, ...]:
        known = vars(self) | {"replaced": frozenset(), "before_read": None}  # which are of one engine
        return type(self), (dict,), known, None, iter(self.items())


def _after_updates(name: str) -> Callable[..., Any]:
    """A method of dict that waits until no update is under way."""

    @wraps(getattr(dict, name))
    def call(self: FirstStates, *arguments: Any, **options: Any) -> Any:
        self._ready()
        return getattr(super(FirstStates, self), name)(*arguments, **options)

    return call


for _name in ("__getitem__", "__delitem__", "__contains__", "__iter__", "__len__", "__ior__"):
    setattr(FirstStates, _name, _after_updates(_name))
for _name in ("keys", "values", "items", "pop", "popitem", "clear", "update", "setdefault"):
    setattr(FirstStates, _name, _after_updates(_name))


def begin_like(state: Mapping[Tensor, State], tensor: Tensor, like: Tensor) -> FirstStates:
    """The state of an optimizer that has updated nothing, and would begin with `tensor` as with `like`."""
    begun = FirstStates()
    if isinstance(state, FirstStates) and like in state.first:
        begun.first[tensor] = state.first[like]
    return begun


def first_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], whole: nn.Parameter, part: nn.Parameter
) -> FirstState | None:
    """Return the state that `optimizer`, which has made one of `whole`, makes of `part` of it; None if it is
    unknown: then it must do so in an update, or fails there."""
    made = optimizer.state.get(whole)
    if not made:
        return None
    small = nn.Parameter(torch.zeros((1,) * max(1, whole.dim()), dtype=part.dtype, device=part.device))
    kind: Any = type(optimizer)
    try:
        found = dict(kind([{**group, "params": [small]}], **optimizer.defaults).state.get(small, {}))
    except (TypeError, ValueError):  # a constructor of the user's, with other arguments
        return None
    by_element = {key for key, v in found.items() if isinstance(v, Tensor) and v.shape == small.shape}
    is_same = found.keys() == made.keys() and all(
        _begins_alike(made[key], found[key], whole if key in by_element else None) for key in found
    )
    if not is_same:
        return None
    return FirstState(
        {key: found[key].reshape(()) for key in by_element},
        {key: found[key] for key in found.keys() - by_element},
    )


def _begins_alike(made: Any, small: Any, whole: Tensor | None) -> bool:
    """Return whether state has the same number for every element of `whole` (or is one number, without it),
    which is that of the small tensor, in the precision of what was made."""
    if not isinstance(made, Tensor) or not isinstance(small, Tensor):
        return isinstance(small, bool | int | float | None) and made == small
    has_shape = made.dim() == 0 if whole is None else made.shape == whole.shape
    return has_shape and bool((made == small.to(made.device, made.dtype)).all())


Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def make_local(
    optimizer: torch.optim.Optimizer, held: Mapping[nn.Parameter, Sequence[nn.Parameter]]
) -> torch.optim.Optimizer:
    """The optimizer over the parts that are `held` of its parameters, in place of these."""
    states = _first_states(optimizer, held)
    own = [p for group in optimizer.param_groups for p in group["params"]]
    for group in optimizer.param_groups:
        group["params"] = [part for p in group["params"] for part in held.get(p, ())]
    optimizer.state.clear()
    states.replaced = frozenset(p for p in own if not any(part is p for part in held.get(p, ())))
    if states.first or states.replaced:
        _keep_states(optimizer, states)
    return optimizer


def _keep_states(optimizer: torch.optim.Optimizer, states: FirstStates) -> None:
    """Let an optimizer have its state there, also after `load_state_dict`."""

    def take(*_: object) -> None:
        if optimizer.state is not states:
            states.take(optimizer.state)
        for each in (optimizer, *inner_optimizers(optimizer)):
            each.state = states

    take()
    if hasattr(optimizer, "register_load_state_dict_post_hook"):
        optimizer.register_load_state_dict_post_hook(take)


def _first_states(
    optimizer: torch.optim.Optimizer, held: Mapping[nn.Parameter, Sequence[nn.Parameter]]
) -> FirstStates:
    """Return the states of all parts, where the optimizer has made state of whole parameters already."""
    states = FirstStates()
    for each in inner_optimizers(optimizer):
        for group in each.param_groups:
            for whole, part in ((p, part) for p in group["params"] for part in held.get(p, ())):
                first = first_state(each, group, whole, part)
                if first is not None:
                    states.first[part] = first
    return states


def make_whole(make: Make, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that `make` makes of whole parameters. torch refuses an optimizer without parameters,
    which a stage of frozen layers has. It gets placeholders: a function may take matrices and vectors
    apart."""
    return make(parameters or [nn.Parameter(torch.zeros(shape)) for shape in ((1, 1), (1,))])
