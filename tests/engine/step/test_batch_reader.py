# ruff: noqa: ARG005 (forwards are there for their signatures)
"""Batches as people hand them in."""

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.engine.step.batch_reader import BatchReader, read_sample, to_plain
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.models import ModelConfig, build, cross_entropy
from echelon.nn.batch import Inputs
from echelon.parallel.own_loss import ObjectiveLoss, OwnLoss
from echelon.plan import Plan

a, b, t = torch.ones(2, 3), torch.ones(2, 3) * 2, torch.zeros(2)


def model_of(forward: Callable[..., Any]) -> nn.Module:
    return type("Net", (nn.Module,), {"forward": forward})()  # type: ignore[no-any-return]


ONE = model_of(lambda self, x: x)
TWO = model_of(lambda self, x, y: x)
OPTIONAL = model_of(lambda self, x, mask=None: x)
ANY = model_of(lambda self, *xs: xs)
NAMED = model_of(lambda self, x, *, mask=None, **options: x)
KEYWORDS = model_of(lambda self, **inputs: inputs)
LABELLED = model_of(lambda self, x, labels: x)


def read(model: nn.Module, batch: Any, loss: Any = nn.functional.mse_loss) -> tuple[Any, Any]:
    loss = OwnLoss(model) if loss is None else loss
    inputs, targets = BatchReader(model, Plan(), loss, by_layers=False).read(batch)
    return ((inputs.args, inputs.kwargs) if isinstance(inputs, Inputs) else inputs), targets


Pair = namedtuple("Pair", ["first", "second"])


@pytest.mark.parametrize(
    ("model", "batch", "expected"),
    [
        (ONE, (a, t), a),
        (ONE, [a, t], a),
        (ONE, (a, None), a),
        (ONE, ((a, b), t), (a, b)),
        (ONE, (a, b, t), (a, b)),
        (ONE, (Pair(a, b), t), Pair(a, b)),
        (ONE, ({"a": a}, t), {"a": a}),
        (TWO, ((a, b), t), ((a, b), {})),
        (TWO, [[a, b], t], ((a, b), {})),
        (TWO, (a, b, t), ((a, b), {})),
        (TWO, (Pair(a, b), t), ((a, b), {})),
        (TWO, ({"x": a, "y": b}, t), ((), {"x": a, "y": b})),
        (TWO, {"x": a, "y": b, "labels": t}, ((), {"x": a, "y": b})),
        (ANY, ((a, b), t), ((a, b), {})),
        (OPTIONAL, (a, t), a),
        (OPTIONAL, (a, b, t), ((a, b), {})),
        (OPTIONAL, UserDict(x=a, mask=b, labels=t), ((), {"x": a, "mask": b})),
        (OPTIONAL, OrderedDict(x=a, labels=t), ((), {"x": a})),
        (OPTIONAL, (Inputs((a, b)), t), (((a, b),), {})),
        (NAMED, {"x": a, "mask": b, "other": 1, "labels": t}, ((), {"x": a, "mask": b, "other": 1})),
        (NAMED, (Inputs(a, mask=b), t), ((a,), {"mask": b})),
        (NAMED, ({"x": a, "other": b}, t), ((), {"x": a, "other": b})),
        (NAMED, ({"other": b}, t), {"other": b}),
        (KEYWORDS, ({"p": a}, t), ((), {"p": a})),
        (LABELLED, {"x": a, "labels": t}, ((), {"x": a, "labels": t})),  # the forward needs them
    ],
)
def test_how_batches_are_read(model: nn.Module, batch: Any, expected: Any) -> None:
    inputs, targets = read(model, batch)
    assert _same(inputs, expected), inputs
    is_without = isinstance(batch, tuple) and batch[1] is None
    assert targets is None if is_without else targets is t


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (ONE, a, "the batch is a Tensor: must be \\(inputs, targets\\), with targets=None"),
        (ONE, [a], "the batch is a list of 1: must be"),
        (ONE, {"x": a, "mask": b}, r"mask: Net.forward\(x\) does not take it; rename or drop it"),
        (ONE, ({"x": a}, t), r"as one argument or by names; write echelon.Inputs\(\{…\}\) for one"),
        (ONE, {1: a}, "the batch is a dict with 1: its names must be text"),
        (TWO, (a, b, a, t), r"3 inputs by position: Net.forward\(x, y\) takes 2"),
        (TWO, {"x": a, "labels": t}, r"y: Net.forward\(x, y\) needs it; add it to the batch"),
        (TWO, ({"x": a, "z": b}, t), "a dict of x, z, and Net.forward"),
        (TWO, (Inputs(a, x=b), t), "x: is given twice"),
        (
            OPTIONAL,
            ((a, b), t),
            r"write echelon.Inputs\(\(a, b\)\) for one, echelon.Inputs\(a, b\) for several",
        ),
    ],
)
def test_batches_that_are_refused(model: nn.Module, batch: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(model, batch)


def test_a_model_with_a_loss_of_its_own_gets_the_labels() -> None:
    """(input_ids, labels) by position would have made the labels of a transformers model its mask."""
    masked = model_of(lambda self, x, mask=None, labels=None: x)
    assert read(masked, {"x": a, "labels": t}, loss=None) == (((), {"x": a, "labels": t}), t)
    assert _same(read(masked, (a, t), loss=None)[0], ((a,), {"labels": t}))
    assert _same(read(TWO, (a, t), loss=None)[0], ((a, t), {}))
    assert read(ONE, (a, None), loss=None) == (a, None)
    with pytest.raises(UserError, match="2 inputs by position"):
        read(ONE, (a, t), loss=None)


def test_mappings_inside_of_a_batch_become_dicts() -> None:
    plain = to_plain((UserDict(x=UserDict(y=a)), [t]))
    assert type(plain[0]) is dict
    assert type(plain[0]["x"]) is dict
    assert plain[1] == [t]


class Two(nn.Module):
    """Two inputs, a keyword, and layers."""

    def __init__(self, *, packed: bool = False) -> None:
        super().__init__()
        self.first, self.second = (Packed() if packed else First()), nn.Linear(4, 1)

    def layers(self) -> list[nn.Module]:
        return [self.first, self.second]

    def forward(self, x: Tensor, y: Tensor, *, scale: float = 1.0) -> Any:
        hidden = self.first((x, y)) if isinstance(self.first, Packed) else self.first(x, y, scale=scale)
        return self.second(hidden)


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Any:
        return self.left(x) * scale + torch.tanh(self.right(y))


class Packed(First):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Any:  # type: ignore[override]
        return super().forward(*pair)


def squares(output: Tensor, targets: Tensor | None) -> Tensor:
    return output.square().mean() if targets is None else nn.functional.mse_loss(output[:, 0], targets)


def batches(kind: str, step: int) -> Any:
    draw = torch.Generator().manual_seed(step)
    x, y = (torch.randn(5, 3, dtype=torch.float64, generator=draw) for _ in range(2))
    targets = torch.randn(5, dtype=torch.float64, generator=draw)
    return {
        "flat": (x, y, targets),
        "nested": ((x, y), targets),
        "dict": {"x": x, "y": y, "scale": 2.0, "labels": targets},
        "none": (x, y, None),
        "packed": (x, y, targets),
    }[kind]


KINDS = ("flat", "nested", "dict", "none", "packed")


def make(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return Two(packed=kind == "packed").double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def train(plan: str) -> dict[str, dict[str, Tensor]]:
    weights = {}
    for kind in KINDS:
        with echelon.parallelize(make(kind), f"{plan} precision=fp64", optimizer=sgd, loss=squares) as engine:
            for step in range(3):
                engine.step(engine.local(batches(kind, step)))
            weights[kind] = engine.full_state_dict()
    return weights


def train_plain(kind: str) -> dict[str, Tensor]:
    model = make(kind)
    optimizer = sgd(model.parameters())
    for step in range(3):
        x, y, targets = batches("none" if kind == "none" else "flat", step)
        output = model(x, y, scale=2.0) if kind == "dict" else model(x, y)
        squares(output, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "plan", ["data=2", "pipeline=2 microbatches=2", pytest.param("data=2 zero=3", marks=pytest.mark.slow)]
)
def test_several_inputs_train_as_on_one_device(plan: str, warm_ranks: Callable[[int], Ranks]) -> None:
    trained, _ = warm_ranks(2).run(train, plan)
    for kind in KINDS:
        for name, value in train_plain(kind).items():
            torch.testing.assert_close(trained[kind][name], value, rtol=0, atol=1e-12, msg=f"{kind} {name}")


def test_the_first_layer_must_take_what_the_model_takes() -> None:
    class Other(Two):
        def layers(self) -> list[nn.Module]:
            return [self.second]

    reader = BatchReader(Other(), Plan.parse("pipeline=2"), squares, by_layers=True)
    with pytest.raises(UserError) as refusal:
        reader.read({"x": a, "y": b})
    assert "runs layer by layer, and the first layer is called" in refusal.value.title
    assert refusal.value.errors[0].startswith("x: Linear.forward(input) does not take it")


def test_a_sample_batch_is_read_too() -> None:
    plan = Plan.parse("pipeline=auto")
    assert read_sample(ONE, plan, squares, None) is None
    inputs, targets = read_sample(Two(), plan, squares, {"x": a, "y": b, "labels": t})  # type: ignore[misc]
    assert (inputs.kwargs, targets) == ({"x": a, "y": b}, t)
    with pytest.raises(UserError, match="sample_batch: the batch is a Tensor"):
        read_sample(ONE, plan, squares, a)


def test_the_loss_of_gates_is_asked_for_in_the_config() -> None:
    """In a batch it was left out of the loss, or was that of a part of the batch, without a word."""
    model = model_of(lambda self, x, output_router_logits=None: x)
    asks = {"x": a, "output_router_logits": True}
    assert read(model, (asks, t))[0] == ((), asks)
    model.config = SimpleNamespace(output_router_logits=False)  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"set model\.config\.output_router_logits=True before"):
        read(model, (asks, t))
    read(model, (asks | {"output_router_logits": False}, t))


def test_positions_of_packed_documents_go_to_every_layer() -> None:
    model = build(ModelConfig("gpt", 2, 16, 2, vocab=32, sequence=8))
    tokens = torch.arange(8)[None]
    batch = Inputs(tokens, position_ids=tokens), tokens
    reader = BatchReader(model, Plan.parse("pipeline=2"), cross_entropy, by_layers=True)
    inputs, _ = reader.read(batch)
    assert (inputs.args, inputs.kwargs, inputs.shared) == ((tokens,), {}, {"position_ids": tokens})
    inputs, _ = BatchReader(model, Plan(), cross_entropy, by_layers=False).read(batch)
    assert (inputs.kwargs, inputs.shared) == ({"position_ids": tokens}, {})
    shares = BatchReader(model, Plan.parse("context=2"), cross_entropy, by_layers=True)
    with pytest.raises(UserError, match="tell the documents of a packed batch apart; use context=1"):
        shares.read(batch)


def test_an_objective_of_a_model_that_runs_layer_by_layer_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8, **sizes))
    loss, plan = ObjectiveLoss(lambda model, batch: model(**batch).loss), Plan.parse("data=2 zero=1")
    BatchReader(model, plan, loss, by_layers=False)
    with pytest.raises(UserError, match=r"LlamaForCausalLM runs layer by layer.*use data"):
        BatchReader(model, plan, loss, by_layers=True)
