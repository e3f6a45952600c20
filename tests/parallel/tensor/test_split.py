"""What a table does to a model, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.cli.main import run
from echelon.collectives import RecordingGroup
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.models import ModelConfig, build, cross_entropy
from echelon.nn.wrapping import Wrapping, is_wrapped
from echelon.parallel.tensor.split import split_over
from echelon.parallel.tensor.styles import Table
from echelon.state.ownership import VALUE
from echelon.verify import Case, assert_equal
from tests.cases import adamw, mean_loss, vectors
from tests.parallel.tensor.models import dropping, gpt, llama, tokens

pytestmark = pytest.mark.usefixtures("warm_contract")

Warm = Callable[[int], Ranks]


class OwnModel(nn.Module):
    """A user's own module, which no table knows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(6, 8), "down": nn.Linear(8, 6)})])
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner:
            x = x + block["down"](torch.tanh(block["up"](self.norm(x))))
        return self.last(x)


TABLE: Table = {"inner.*.up": "column", "inner.*.down": "row", "norm": "replicated", "last": "replicated"}


def refused(model: nn.Module, ranks: int, table: Table | None = None) -> list[str]:
    group = RecordingGroup("tensor", 0, ranks)
    with pytest.raises(UserError) as caught:
        split_over(model, group, table, Wrapping(), sequence=False, whole_sequence=[], join_logits=True)
    return list(caught.value.errors)


def test_a_module_that_no_table_knows_is_named_with_the_line_to_add() -> None:
    (error,) = refused(OwnModel(), 2, {"norm": "replicated"})
    assert error.startswith(
        "no table knows 3 modules (inner.*.up, inner.*.down, last); pass one to parallelize"
    )
    assert [line.strip() for line in error.splitlines()[1:6]] == [
        "tensor_table={",
        "'inner.*.up': 'column',",
        "'inner.*.down': 'row',",
        "'last': 'replicated',",
        "}",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tensor_table": TABLE}])
def test_a_few_lines_make_it_known(options: dict[str, Any]) -> None:
    case = Case(OwnModel, vectors, mean_loss, adamw, options=options)
    assert_equal(case, "tensor=2")
    assert_equal(case, "data=2 tensor=2 zero=2 microbatches=2")


def test_heads_must_divide() -> None:
    config = ModelConfig("llama", 2, 24, 6, vocab=32, sequence=16, kv_heads=3, ffn=48)
    errors = refused(build(config), 2)
    assert errors == [
        "config.num_kv_heads=3 is not divisible by 2 ranks; use tensor=1, or a model where it is a multiple "
        "of 2"
    ]
    assert any("config.heads=6 is not divisible by 4 ranks" in error for error in refused(build(config), 4))


def test_all_errors_are_reported_at_once() -> None:
    errors = refused(OwnModel(), 3, {"inner.*.up": "column", "inner.*.down": "vocabulary", "norm": "row"})
    text = "\n".join(errors)
    assert "no table knows 1 module (last)" in text
    assert "norm (LayerNorm): cannot be 'row'" in text
    assert "inner.0.up.weight: its split dim of 8 is not divisible by 3; make it 9" in text


def test_a_word_that_is_none() -> None:
    with pytest.raises(UserError, match=r"'colum'.*did you mean 'column'"):
        split_over(
            OwnModel(),
            RecordingGroup("tensor", 0, 2),
            {"last": "colum"},
            Wrapping(),
            sequence=False,
            whole_sequence=[],
            join_logits=True,
        )


def test_tied_modules_must_be_split_alike() -> None:
    errors = refused(gpt(), 2, {"head.projection": "replicated"})
    assert errors == [
        "embedding.tokens and head.projection share a parameter, and their styles split it differently"
    ]


def test_the_command_refuses_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "--plan", "tensor=3", "--steps", "1"]) == 2
    message = capsys.readouterr().err
    assert "config.heads=4" in message
    assert "blocks.1." not in message  # layers are alike: one is reported
    assert "Traceback" not in message


def shapes_and_owned(
    plan: str,
) -> tuple[dict[str, tuple[int, ...]], list[tuple[Any, ...]], dict[str, Tensor]]:
    torch.manual_seed(0)
    engine = echelon.parallelize(gpt(), plan, optimizer=adamw, loss=cross_entropy)
    engine.step(engine.local(tokens(0)))
    shapes = {name: tuple(p.shape) for name, p in engine.module.named_parameters()}
    return shapes, [tuple(owned.slice) for owned in engine.owned()], engine.full_state_dict()


def test_ranks_hold_their_part_and_say_where_it_lies(warm_ranks: Warm) -> None:
    first, second = warm_ranks(2).run(shapes_and_owned, "tensor=2")
    assert first[0] == second[0]
    assert first[0]["blocks.0.attention.query.weight"] == (8, 16)
    assert first[0]["blocks.0.attention.output.weight"] == (16, 8)
    assert first[0]["embedding.tokens.weight"] == (16, 16)
    assert first[0]["blocks.0.mlp_norm.weight"] == (16,)
    boxes = {box[0]: box for box in second[1] if box[1] == VALUE}
    assert boxes["blocks.0.attention.query.weight"][2:5] == ((16, 16), (8, 0), (8, 16))
    assert boxes["blocks.0.mlp_norm.weight"][2:] == ((16,), (0,), (16,))
    whole = build(gpt().config).state_dict()
    for _, _, state in (first, second):
        assert {name: value.shape for name, value in state.items()} == {n: t.shape for n, t in whole.items()}
        assert all(torch.equal(value, first[2][name]) for name, value in state.items())


def start(plan: str, rank_seeds: bool) -> dict[str, Tensor]:
    torch.manual_seed(int(rank_seeds) * torch.distributed.get_rank())
    engine = echelon.parallelize(llama(), plan, optimizer=adamw, loss=cross_entropy)
    return engine.full_state_dict()


def test_the_start_is_that_of_one_device(warm_ranks: Warm) -> None:
    """Whatever the other ranks have drawn."""
    torch.manual_seed(0)
    whole = llama().state_dict()
    for state in warm_ranks(4).run(start, "tensor=2 pipeline=2", True):
        assert all(torch.equal(value, whole[name]) for name, value in state.items())
        assert state.keys() == whole.keys()


class Shifted(nn.Module):
    """Has buffers: one that is saved, one that is not, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 5)
        self.register_buffer("shift", torch.randn(6))
        self.register_buffer("scale", torch.randn(6), persistent=False)
        self.register_buffer("order", torch.randperm(6))

    def forward(self, x: Tensor) -> Tensor:
        x = (x * self.scale + self.shift)[:, self.order]
        return self.last(self.down(torch.tanh(self.up(x))))


def start_of_buffers(plan: str) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """The buffers that this rank trains with, the whole state, and the loss of a step."""
    torch.manual_seed(torch.distributed.get_rank())
    table = {"up": "column", "down": "row", "last": "replicated"}
    engine = echelon.parallelize(Shifted(), plan, optimizer=adamw, loss=mean_loss, tensor_table=table)
    buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    return buffers, engine.full_state_dict(), engine.step(vectors(0)).loss


def test_buffers_start_as_those_of_the_first_rank(warm_ranks: Warm) -> None:
    """Every rank's hidden states go through its own buffers, and the sum over ranks would mix them."""
    torch.manual_seed(0)
    model = Shifted()
    inputs, targets = vectors(0)
    loss = mean_loss(model(inputs), targets).item()
    for buffers, state, loss_of_step in warm_ranks(2).run(start_of_buffers, "tensor=2"):
        expected = dict(model.named_buffers())
        assert buffers.keys() == expected.keys()
        assert all(torch.equal(buffer, expected[name]) for name, buffer in buffers.items())
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
        assert loss_of_step == pytest.approx(loss, rel=1e-5)


def second_engine(plan: str) -> list[bool]:
    """Whether a closed engine leaves a model as it was, and a second one trains it as it trains a new one."""
    torch.manual_seed(0)
    model = dropping()
    with echelon.parallelize(model, plan, optimizer=adamw, loss=cross_entropy) as first:
        first.step(first.local(tokens(0)))
    fresh = dropping()
    fresh.load_state_dict(model.state_dict())
    states = []
    for each in (model, fresh):
        with echelon.parallelize(each, plan, optimizer=adamw, loss=cross_entropy) as engine:
            engine.step(engine.local(tokens(1)))
            states.append(engine.full_state_dict())
    equal = [torch.equal(value, states[1][name]) for name, value in states[0].items()]
    return [*equal, *(not is_wrapped(module) and not module._forward_pre_hooks for module in model.modules())]


@pytest.mark.slow_cases("tensor=2 sequence=true")
@pytest.mark.parametrize("plan", ["tensor=2", "tensor=2 sequence=true"])
def test_a_second_engine_over_a_model_works(warm_ranks: Warm, plan: str) -> None:
    assert all(all(checks) for checks in warm_ranks(2).run(second_engine, plan))


def used_before(plan: str) -> list[float]:
    torch.manual_seed(0)
    model = gpt()
    inputs, targets = tokens(0)
    total, _ = cross_entropy(model(inputs), targets)
    total.backward()
    model.zero_grad()
    engine = echelon.parallelize(model, plan, optimizer=adamw, loss=cross_entropy)
    # `total` lives on, and its graph remembers the shapes of the parameters that were used.
    return [engine.step(engine.local(tokens(0))).loss for _ in range(2)] + [float(total.detach())]


def test_a_model_that_was_used_before_can_be_split(warm_ranks: Warm) -> None:
    """pipeline=auto measures the whole model first; its gradients then did not fit the parts. Random plans
    found it."""
    for losses in warm_ranks(2).run(used_before, "tensor=2"):
        assert losses[1] < losses[0]
