"""What models start with, tensor by tensor, is what their constructors give them."""

import copy
from collections.abc import Callable
from types import FunctionType

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.models import build
from echelon.nn.initialization.initial_values import WeightSource, deferred, is_deferred, named_tensors
from echelon.nn.initialization.tape import Tape, recording
from echelon.state.ownership import Slice

CPU = torch.device("cpu")


class Odd(nn.Module):
    """Ways to give tensors values that are not those of torch's own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Parameter(torch.randn(300, 3) * 0.5)
        self.rows = nn.Linear(40, 30)
        nn.init.orthogonal_(self.rows.weight)
        self.rows.weight.data.mul_(2)
        self.cut = nn.Parameter(torch.empty(40, 40))
        nn.init.trunc_normal_(self.cut, std=0.3, a=-0.1, b=0.1)
        self.few = nn.Parameter(torch.empty(20, 20))
        nn.init.sparse_(self.few, sparsity=0.5)
        self.embedding = nn.Embedding(10, 40, padding_idx=2)
        self.tied = nn.Linear(40, 10, bias=False)
        self.tied.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(7)
        self.from_numpy = nn.Parameter(torch.from_numpy(np.arange(6.0)))
        self.register_buffer("constants", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("angles", 10.0 ** -(torch.arange(0, 8, 2) / 8), persistent=False)
        self.mask = torch.tril(torch.ones(5, 5))
        self.half = nn.Linear(30, 30).half()


def values_of(make: Callable[[], nn.Module], seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model = deferred(make)
    assert is_deferred(model)
    values = WeightSource(model, CPU)
    assert not values.errors()
    return {name: values.tensor(name) for name, _ in named_tensors(model)}


def assert_alike(found: dict[str, Tensor], model: nn.Module) -> None:
    """Of random values the spread must agree; others are equal."""
    expected = {name: tensor.detach() for name, tensor in named_tensors(model)}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype), name
        spread = tensor.double().std(correction=0)
        if tensor.numel() < 200 or spread == 0:
            is_drawn = name.endswith(("bias", "embedding.weight", "tied.weight", "original0"))
            assert is_drawn or torch.equal(found[name], tensor), name
        else:
            assert 0.85 < found[name].double().std(correction=0) / spread < 1.15, name
            assert abs(found[name].double().mean() - tensor.double().mean()) < 0.2 * spread, name


@pytest.mark.parametrize(
    "make",
    [
        Odd,
        lambda: build("gpt-tiny"),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, batch_first=True), 2),
        lambda: nn.LSTM(64, 64, 2),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(50, 50)),
    ],
    ids=["odd", "gpt", "encoder", "lstm", "weight_norm"],
)
def test_constructors_are_repeated(make: Callable[[], nn.Module]) -> None:
    assert_alike(values_of(make), make())


def test_special_values_are_kept() -> None:
    values = values_of(Odd)
    weight = values["rows.weight"] / 2
    assert torch.allclose(weight @ weight.t(), torch.eye(30), atol=1e-5), "orthogonal"
    assert values["cut"].abs().max() <= 0.1, "truncated"
    assert (values["few"] == 0).float().mean() == 0.5, "sparse"
    assert values["embedding.weight"][2].abs().sum() == 0, "the padding"
    assert torch.equal(values["tied.weight"], values["embedding.weight"])


def test_values_follow_from_seed_and_name_alone() -> None:
    class More(Odd):
        def __init__(self) -> None:
            self_made = nn.Linear(3, 3)
            super().__init__()
            self.more = self_made

    values, again, other, more = values_of(Odd), values_of(Odd), values_of(Odd, seed=1), values_of(More)
    assert all(torch.equal(values[name], again[name]) for name in values)
    assert not torch.equal(values["rows.bias"], other["rows.bias"])
    names = ("scaled", "rows.weight", "rows.bias", "cut", "few", "embedding.weight", "half.weight")
    assert all(torch.equal(values[name], more[name]) for name in names)
    assert not torch.equal(values["scaled"][:50], values["scaled"][50:100])


def test_boxes_are_parts_of_the_whole() -> None:
    values = WeightSource(deferred(lambda: nn.Linear(6, 4)), CPU)
    box = Slice("weight", "value", (4, 6), (1, 2), (2, 3))
    (part,) = values.read("weight", [box])
    assert torch.equal(part, values.tensor("weight")[1:3, 2:5])


def test_models_built_on_meta_reset_their_modules() -> None:
    with torch.device("meta"):
        model = build("gpt-tiny")
    values = WeightSource(model, CPU)
    assert not values.errors()
    assert_alike({name: values.tensor(name) for name, _ in named_tensors(model)}, build("gpt-tiny"))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.arange(3.0))


def test_what_cannot_be_replayed_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Scale())
    errors = WeightSource(model, CPU).errors()
    assert [error.partition(":")[0] for error in errors] == ["1.scale", "1.table"]
    assert "Scale was built on the meta device and has no reset_parameters()" in errors[0]
    assert "echelon.deferred(lambda: …)" in errors[0]
    empty = WeightSource(deferred(lambda: nn.ParameterList([torch.empty(3)])), CPU).errors()
    assert empty == ["0: nothing gave it values while the model was built; initialise it there"]


def test_torch_s_initialisers_do_not_see_the_meta_device() -> None:
    """Those of some versions of torch give a tensor there no values at all."""

    def is_seen(tensor: Tensor) -> bool:
        return tensor.is_meta

    is_seen_by_torch = FunctionType(is_seen.__code__, vars(nn.init))
    with recording(Tape()):
        tensor = torch.empty(2)
        assert is_seen(tensor)
        assert not is_seen_by_torch(tensor)


def test_changes_after_the_recording_are_refused() -> None:
    model = deferred(lambda: nn.Linear(3, 3))
    nn.init.zeros_(model.bias)
    (error,) = WeightSource(model, CPU).errors()
    assert error == "bias: was changed after echelon.deferred had built the model; do it inside the function"
    moved = deferred(lambda: nn.Linear(3, 3)).half()
    assert len(WeightSource(moved, CPU).errors()) == 2


def test_parts_copies_and_surroundings_are_refused() -> None:
    """Their values would be those of modules that reset themselves, and not what the constructor did."""
    inner = deferred(lambda: nn.Sequential(nn.Linear(3, 3)))
    for model in (inner[0], copy.deepcopy(inner), nn.Sequential(inner, nn.Linear(3, 3))):
        with pytest.raises(UserError, match="is a part or a copy of a model that"):
            WeightSource(model, CPU)


def test_tensors_in_lists_and_generators_are_named() -> None:
    class Hidden(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.masks = [torch.ones(2)]
            nn.init.normal_(self.bias, generator=torch.Generator("cpu"))

    assert WeightSource(deferred(Hidden), CPU).errors() == [
        "bias: is drawn by a generator of its own; leave generator= out",
        "masks: is a list with tensors; make them buffers",
    ]


def test_bad_functions_are_explained() -> None:
    with pytest.raises(UserError, match="returned a list; return a"):
        deferred(lambda: [nn.Linear(2, 2)])  # type: ignore[arg-type, return-value]
    with pytest.raises(UserError, match="looks at values of its tensors while it is built"):
        deferred(lambda: nn.Linear(2, 2) if torch.ones(2).numpy().sum() else nn.Linear(3, 3))
    with pytest.raises(ZeroDivisionError):
        deferred(lambda: nn.Linear(1 // 0, 2))


transformers = pytest.importorskip("transformers")


def small_llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = small_llama(), nn.Linear(64, 400)


@pytest.mark.parametrize("recorded", [True, False], ids=["deferred", "meta"])
def test_weights_have_the_spread_that_transformers_gives_them(recorded: bool) -> None:
    if recorded:
        holder = deferred(Holder)
    else:
        with torch.device("meta"):
            holder = Holder()
    values = WeightSource(holder, CPU)
    assert not values.errors()
    for name, expected in named_tensors(Holder()):
        found, wanted = values.tensor(name).double(), expected.detach().double()
        if "inv_freq" in name or "norm" in name:
            assert torch.equal(found, wanted), name
        else:
            assert 0.9 < found.std() / wanted.std() < 1.1, name


def test_what_has_values_keeps_them_and_nothing_is_marked() -> None:
    with torch.device("meta"):
        model = Holder()
    name = "model.model.layers.0.mlp.up_proj.weight"
    weights = torch.rand(96, 64)
    model.load_state_dict({name: weights.clone()}, strict=False, assign=True)
    for _ in range(2):  # a first try leaves nothing behind
        values = WeightSource(model, CPU)
        assert not values.errors()
        assert torch.equal(values.tensor(name), weights)
        assert torch.equal(model.get_parameter(name).detach(), weights)


def test_containers_reset_after_what_they_contain() -> None:
    with torch.device("meta"):
        model = nn.Transformer(32, 4, 1, 1, 64, batch_first=True)
    values = WeightSource(model, CPU)
    expected = nn.Transformer(32, 4, 1, 1, 64, batch_first=True).encoder.layers[0].linear1.weight
    found = values.tensor("encoder.layers.0.linear1.weight")
    assert 0.9 < found.std() / expected.std() < 1.1, "xavier, and not that of nn.Linear"


def test_ties_of_two_modules_that_both_reset_are_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
    (error,) = WeightSource(model, CPU).errors()
    assert error.startswith("0.weight: is tied, and several modules give it values")
