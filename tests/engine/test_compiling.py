"""compile=true: equal to one device that does not compile, with little compiled, and nothing baked in.

Most tests record and differentiate the layers as torch.compile always does, but run what was recorded as it
stands ("aot_eager"): C++ takes minutes to make, and is torch's own affair. The slow ones make it.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.collectives.recording_group import RecordingGroup
from echelon.engine.compiling import compile_layers
from echelon.engine.layer_compiler import LayerCompiler
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.models import ModelConfig, build
from echelon.nn.head.losses import LossCompiler
from echelon.nn.wrapping import Wrapping
from echelon.parallel.data.buffers import Buffers
from echelon.parallel.stage import Stage
from echelon.plan import Plan
from echelon.verify import Case
from echelon.verify.contract import judge, train_rank
from echelon.verify.reference import TrainingResult
from tests.cases import adamw
from tests.contract_models import SEQUENCE, VOCAB, Encoder, class_loss, token_loss, tokens, vectors

Warm = Callable[[int], Ranks]


def dropping(layers: int = 2) -> nn.Module:
    config = ModelConfig("gpt", layers, 16, 2, vocab=VOCAB + 1, sequence=SEQUENCE, dropout=0.2)
    return build(config)


class Breaking(nn.Module):
    """Lists no layers, and looks at its numbers in the middle: what torch cannot record."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(6, 12), nn.Linear(12, 5), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.left(x) if float(x.detach().sum()) > 0 else self.right(x) + self.left(x)


class WithClassToken(nn.Module):
    """A token before those of the sample, and positions: with one sample, their gradients are views of one
    tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.ones(1, 1, 6)), nn.Parameter(torch.ones(1, 2, 6))
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(len(x), -1, -1), x[:, None]], 1) + self.positions
        return self.last(torch.tanh(tokens).sum(1))


def two_vectors(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = vectors(step)
    return inputs[:2], targets[:2]


def one_vector(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = vectors(step)
    return inputs[:1], targets[:1]


def twelve(step: int) -> tuple[Tensor, Tensor]:
    """As many samples for each rank and microbatch: every other number would be compiled too."""
    inputs, targets = tokens(step)
    return inputs[:12], targets[:12]


@contextmanager
def backend(name: str) -> Iterator[list[object]]:
    """Compile with another backend than torch's own; yields the options of each call, which are its own.
    What a plan changes in graphs is changed, as always; then they run as they stand."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    from echelon.engine.layer_passes import LayerPasses

    compile_, lower_layer, asked = torch.compile, LayerCompiler.lower, []

    def compile_otherwise(
        function: Callable[..., object],
        *,
        options: object = None,
        backend: object = None,
        fullgraph: bool = False,
    ) -> object:
        asked.append(options)
        given = options if name == "inductor" else None
        return compile_(function, backend=backend or name, options=given, fullgraph=fullgraph)  # type: ignore[call-overload]

    def divide(self: LayerCompiler, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        if name == "inductor":
            return lower_layer(self, graph, inputs)
        from torch._dynamo.backends.debugging import boxed_nop
        from torch._inductor.decomposition import select_decomp_table

        passes = LayerPasses(adds_products=self.adds_products, repeats_products=self.repeats_products)

        def partition(joint: torch.fx.GraphModule, *args: Any, **options: Any) -> Any:
            passes(joint.graph)
            joint.recompile()
            return min_cut_rematerialization_partition(joint, *args, **options)

        compilers = dict.fromkeys(("fw_compiler", "bw_compiler"), boxed_nop)
        table = select_decomp_table()
        return aot_autograd(**compilers, partition_fn=partition, decompositions=table)(graph, inputs)

    def lower(self: LossCompiler, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return torch._dynamo.lookup_backend(name)(graph, inputs)

    selective = patch.object(LayerCompiler, "lower", divide)
    loss = patch.object(LossCompiler, "lower", lower)
    with patch.object(torch, "compile", compile_otherwise), selective, loss:
        yield asked


def train(case: Case, plan: str, name: str) -> TrainingResult:
    with backend(name):
        return train_rank(case, dataclasses.replace(Plan.parse(plan), precision="fp64"), None)


def assert_equal(ranks: Ranks, case: Case, plan: str, name: str = "aot_eager") -> None:
    verdict = judge(case, ranks.run(train, case, f"{plan} compile=true", name))
    assert verdict.equal, str(verdict)


TOKEN = Case(WithClassToken, two_vectors, class_loss, adamw, steps=2, clip=0.1)
GPT = Case(dropping, twelve, token_loss, adamw, steps=2)
BREAKING = Case(Breaking, vectors, class_loss, adamw, steps=3, options={"smallest_unit": 1, "audit": "off"})
ENCODER = Case(Encoder, tokens, token_loss, adamw, steps=2, options={"smallest_unit": 1})

FAST = ["data=2 zero=3", "pipeline=2 microbatches=2"]
MORE = [
    "data=2",
    "data=2 zero=1",
    "data=2 zero=2 microbatches=2",
    "data=2 sync=parameter-server",
    "data=2 sync=async",
    "context=2",
    "pipeline=2 microbatches=2 schedule=gpipe",
    "pipeline=2 microbatches=2 schedule=interleaved chunks=2",
    "pipeline=2 microbatches=2 schedule=pipedream",
    "pipeline=2 microbatches=2 schedule=pipedream-vertical",
    "pipeline=2 microbatches=2 schedule=pipedream-2bw",
]


@pytest.mark.slow_cases("data=2 zero=3", "pipeline=2 microbatches=2")
@pytest.mark.parametrize("plan", FAST)
def test_compiled_layers_with_dropout_are_equal_to_one_device(warm_ranks: Warm, plan: str) -> None:
    assert_equal(warm_ranks(2), GPT, plan)


@pytest.mark.slow
def test_a_model_without_layers_and_with_a_break_is_compiled_as_a_whole(warm_ranks: Warm) -> None:
    assert_equal(warm_ranks(2), BREAKING, "data=2 zero=3")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("plan", ["microbatches=2", "tensor=1"])
def test_gradients_that_the_compiler_returns_as_views_are_added_and_clipped_once(
    warm_ranks: Warm, plan: str
) -> None:
    case = TOKEN if "microbatches" in plan else dataclasses.replace(TOKEN, make_batch=one_vector)
    assert_equal(warm_ranks(1), case, plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", MORE)
def test_every_other_plan_too(warm_ranks: Warm, plan: str) -> None:
    case = dataclasses.replace(GPT, clip=None) if "pipedream" in plan else GPT
    assert_equal(warm_ranks(2), case, plan)


@pytest.mark.slow
def test_torch_s_own_transformer_too(warm_ranks: Warm) -> None:
    assert_equal(warm_ranks(2), ENCODER, "data=2 zero=3")


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data=2", "data=2 zero=3", "tensor=2", "context=2"])
def test_what_is_made_of_them_in_c_is_equal_too(plan: str) -> None:
    with Ranks(2, deadline=600.0) as ranks:
        assert_equal(ranks, GPT, plan, "inductor")


def train_counting(case: Case, plan: str) -> tuple[TrainingResult, dict[str, int], int]:
    """Also why torch has split layers into several graphs, and how many graphs there are."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    result = train(case, f"{plan} compile=true", "aot_eager")
    return result, dict(counters["graph_break"]), counters["stats"]["unique_graphs"]


@pytest.mark.slow_cases("tensor=2")
@pytest.mark.parametrize("plan", ["tensor=2", pytest.param("tensor=2 sequence=true", marks=pytest.mark.slow)])
def test_a_split_layer_with_dropout_is_one_graph(warm_ranks: Warm, plan: str) -> None:
    """The embedding, the blocks and the head, in training and in evaluation. Messages and masks are
    operators of the graphs."""
    results = warm_ranks(2).run(train_counting, GPT, plan)
    assert [(breaks, graphs) for _, breaks, graphs in results] == [({}, 6)] * 2
    verdict = judge(GPT, [result for result, _, _ in results])
    assert verdict.equal, str(verdict)


# What is compiled, and how often.


def num_graphs(layers: list[int], precision: str) -> list[int]:
    """How many graphs a step of each model has added in this process."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()  # what was found of another type of numbers is not known here
    added = []
    with backend("aot_eager"):
        for number in layers:
            before = counters["stats"]["unique_graphs"]
            model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(number)))
            plan = f"microbatches=5 compile=true precision={precision}"
            engine = echelon.parallelize(model, plan, optimizer=adamw, loss=class_loss)
            engine.step(vectors(0))
            engine.step(vectors(1))
            added.append(counters["stats"]["unique_graphs"] - before)
    return added


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_and_engines_share_what_is_compiled(warm_ranks: Warm, precision: str) -> None:
    first, *others = warm_ranks(1).run(num_graphs, [2, 2, 5], precision)[0]
    # For microbatches of 3 samples and, since later ones have 2, of any number; with and without a gradient
    # of the input, which the first layer's does not need. In bf16, those of 2 find sums of gradients in
    # float32, with which torch would record nothing.
    assert (first, *others) == (4, 0, 0)


def num_dropping_graphs(layers: int) -> list[int]:
    from torch._dynamo.utils import counters

    added = []
    with backend("aot_eager"):
        for number in (layers, layers + 1):
            before = counters["stats"]["unique_graphs"]
            plan = "compile=true"
            engine = echelon.parallelize(dropping(number), plan, optimizer=adamw, loss=token_loss)
            for step in range(3):
                engine.step(tokens(step))
            added.append(counters["stats"]["unique_graphs"] - before)
    return added


@pytest.mark.slow
def test_dropout_is_no_reason_to_compile_every_layer_and_step_again(warm_ranks: Warm) -> None:
    first, second = warm_ranks(1).run(num_dropping_graphs, 1)[0]
    assert first > 0
    assert second == 0


def compiled_options(plan: str) -> list[object]:
    with backend("eager") as asked:  # which knows the options as well, and differentiates nothing
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
        table = {"0": "column", "2": "row"} if "tensor" in plan else None
        engine = echelon.parallelize(model, plan, optimizer=adamw, loss=class_loss, tensor_table=table)
        engine.step(engine.local(vectors(0)))
        engine.close()
    return asked


def test_tensor_ranks_take_the_same_kernels(warm_ranks: Warm) -> None:
    """Each computes the gradients of weights that are not split, and the weights must not drift apart."""
    ranks = warm_ranks(2)
    assert ranks.run(compiled_options, "tensor=2 compile=true") == [[{"deterministic": True}] * 3] * 2
    assert ranks.run(compiled_options, "data=2 compile=true") == [[None] * 3] * 2


def one_stage(model: nn.Module) -> Stage:
    return Stage(0, model, [], Buffers(model, RecordingGroup("data")))


def copied() -> tuple[list[str], list[str], float]:
    with backend("aot_eager"):
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5))
        names = list(model.state_dict())
        compile_layers([one_stage(model)], Plan(compile=True), Wrapping())
        x = torch.ones(2, 6)
        model(x)
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        return names, list(model.state_dict()), float(other(x).abs().sum())


def test_a_compiled_model_keeps_its_names_and_can_be_copied(warm_ranks: Warm) -> None:
    names, after, output = warm_ranks(1).run(copied)[0]
    assert after == names
    assert output > 0  # of the copy's own weights, which are not 0


def refusal_without_compiler() -> str:
    import torch._inductor.config

    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        try:
            compile_layers([one_stage(nn.Linear(1, 1))], Plan(compile=True), Wrapping())
        except UserError as error:
            return str(error)
    return ""


def test_a_missing_compiler_is_reported_at_the_start(warm_ranks: Warm) -> None:
    assert "install g++" in warm_ranks(1).run(refusal_without_compiler)[0]


def plain() -> bool:
    engine = echelon.parallelize(nn.Linear(6, 5), "data=1", optimizer=adamw, loss=class_loss)
    return "forward" in engine.module.__dict__


def test_nothing_is_compiled_unless_asked(warm_ranks: Warm) -> None:
    assert not warm_ranks(1).run(plain)[0]
