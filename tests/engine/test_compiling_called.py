"""compile=true where the model's own forward calls its layers, as that of transformers does: each layer is
compiled by itself, one graph for all of a class, and so is what is beside them."""

import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.engine.compiling import CompiledForward, compiled_modules
from echelon.launching import Ranks
from echelon.models import cross_entropy
from echelon.nn.huggingface.modules import without_cache
from echelon.nn.layering import name_layers
from echelon.parallel.pipeline import split_model
from echelon.plan import Plan
from echelon.verify import Case
from echelon.verify.contract import judge
from tests.cases import adamw
from tests.contract_models import ResNet
from tests.engine.test_compiling import backend, one_stage, train
from tests.nn.huggingface import encoders, models, timm_like
from tests.unlisted_models import VAE, Lightning, NanoGPT

Warm = Callable[[int], Ranks]


def compiled_names(model: nn.Module, plan: str = "compile=true") -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return [names[module] for module in compiled_modules(one_stage(model), Plan.parse(plan))]


def test_layers_and_what_is_beside_them_are_compiled_each_by_itself() -> None:
    """A list of wrappers made at each call was not a part of the model: all of it was one graph of 69 s."""
    layers = [f"model.layers.{number}" for number in range(3)]
    assert compiled_names(models.make("llama")) == [*layers, "model.norm"]
    blocks = ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    assert compiled_names(encoders.make("bert")) == ["bert.embeddings", *blocks, "cls"]
    around = ["model.transformer.h.0", "model.transformer.h.1", "model.transformer.ln_f"]
    assert compiled_names(Lightning()) == around


def test_an_architecture_that_is_not_known_has_its_blocks_too() -> None:
    parts = ("block.0", "block.1", "final_layer_norm")
    expected = [f"{stack}.{part}" for stack in ("encoder", "decoder") for part in parts]
    assert compiled_names(encoders.make("t5")) == expected


@pytest.mark.parametrize(
    ("plan", "makes_masks"), [("zero=3", False), ("recompute=full", False), ("context=2", True)]
)
def test_what_makes_a_mask_is_compiled_only_where_there_is_none(plan: str, *, makes_masks: bool) -> None:
    """A mask is made whole while it is traced, and attention takes twice as long."""
    stage = one_stage(split_model(models.make("llama"), []).stages[0])
    kinds = [type(module).__name__ for module in compiled_modules(stage, Plan.parse(f"{plan} compile=true"))]
    assert kinds.count("DecoderLayer" if makes_masks else "LlamaDecoderLayer") == 3


def test_layers_that_the_user_names_are_compiled_each_by_itself() -> None:
    model = NanoGPT(2)
    assert compiled_names(model) == [""]  # all of it: it lists none
    name_layers(model, "transformer.h")
    assert compiled_names(model) == ["transformer.h.0", "transformer.h.1", "transformer.ln_f"]
    assert compiled_names(VAE()) == [""]


def test_dropout_beside_layers_is_not_compiled() -> None:
    """Nor are modules without weights, nor a single product or look-up: there is nothing to fuse."""
    model = timm_like.VisionTransformer()
    name_layers(model, "blocks")
    beside = set(compiled_names(model)) - {name for name, _ in model.named_modules() if "blocks." in name}
    kinds = {type(model.get_submodule(name)) for name in beside}
    assert nn.Dropout not in kinds
    assert nn.Linear not in kinds
    assert nn.Conv2d in kinds  # with its bias


# Equal to one device that does not compile.


def eight(kind: str, step: int) -> tuple[Tensor, Tensor]:
    """As many samples for each rank and microbatch: every other number would be compiled too."""
    if kind == "vit":
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(8, 3, 8, 8, generator=generator)
        return images, torch.randint(3, (8,), generator=generator)
    return models.tokens(step, samples=8)


def case(kind: str, **changes: Any) -> Case:
    family: Any = encoders if kind in encoders.KINDS else models
    made: Case = family.case(kind, steps=2, **changes)
    return dataclasses.replace(made, make_batch=partial(eight, kind))


QUICK = [("llama", "data=2 microbatches=2")]
PLANS = ["data=2 microbatches=2", "data=2 zero=3", "tensor=2", "recompute=selective microbatches=2"]
MORE = [each for each in product(("llama", "gpt2", "mixtral", "vit"), PLANS) if each not in QUICK]
MORE += [("bert", "data=2"), ("t5", "data=2 zero=1")]


def prove(ranks: Ranks, case: Case, plan: str) -> None:
    verdict = judge(case, ranks.run(train, case, f"{plan} compile=true", "aot_eager"))
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize(
    ("kind", "plan"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)]
)
def test_models_of_transformers_are_equal(warm_ranks: Warm, kind: str, plan: str) -> None:
    changes = {"resid_pdrop": 0.1, "embd_pdrop": 0.1} if kind == "gpt2" else {}
    prove(warm_ranks(Plan.parse(plan).ranks), case(kind, **changes), plan)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [None, "blocks"])
def test_networks_for_images_are_equal(warm_ranks: Warm, layers: str | None) -> None:
    made = Case(
        ResNet, partial(eight, "vit"), encoders.label_loss, adamw, steps=2, options={"layers": layers}
    )
    prove(warm_ranks(2), made, "data=2 microbatches=2")


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data=2 zero=3", "pipeline=2 microbatches=2", "data=2 recompute=full"])
@pytest.mark.parametrize(("model", "layers"), [(NanoGPT, "transformer.h"), (Lightning, None)])
def test_layers_that_a_forward_calls_are_equal(
    warm_ranks: Warm, plan: str, model: Callable[[], nn.Module], layers: str | None
) -> None:
    options = {"layers": layers, "smallest_unit": 1}
    made = Case(model, partial(eight, "gpt2"), cross_entropy, adamw, steps=2, options=options)
    prove(warm_ranks(2), made, plan)


# What is compiled once.


def num_graphs(kind: str, plan: str) -> tuple[list[int], int, dict[str, int]]:
    """How many graphs each step adds, and then steps of another engine on the same model; how many an
    evaluation; and why torch has split a graph."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = (encoders if kind in encoders.KINDS else models).make(kind)
    loss, added = case(kind).loss, []
    with backend("aot_eager"):
        for _ in range(2):
            with echelon.parallelize(
                model, f"{plan} compile=true", optimizer=adamw, loss=loss, audit="off"
            ) as engine:
                for step in range(2):
                    before = counters["stats"]["unique_graphs"]
                    engine.step(engine.local(eight(kind, step)))
                    added.append(counters["stats"]["unique_graphs"] - before)
        before = counters["stats"]["unique_graphs"]
        with echelon.parallelize(model, f"{plan} compile=true", optimizer=adamw, loss=loss) as engine:
            engine.evaluate(engine.local(eight(kind, 0)))
    return added, counters["stats"]["unique_graphs"] - before, dict(counters["graph_break"])


# The blocks and the final norm, which are all that is compiled where the model's own forward runs; and the
# embedding and the head, where a plan has them as layers. recompute=selective makes two graphs of a block.
GRAPHS = [
    ("llama", "microbatches=2 precision=bf16", 2),
    ("llama", "microbatches=2", 2),
    ("llama", "data=2 zero=3", 3),
    ("llama", "tensor=2", 2),
    ("llama", "recompute=selective microbatches=2", 3),
    ("gpt2", "microbatches=2 precision=bf16", 2),
    ("gpt2", "tensor=2", 2),
    ("vit", "data=2 microbatches=2", 3),
    ("bert", "data=2 microbatches=2", 3),
]


@pytest.mark.slow_cases(*(f"{kind}-{plan}-{graphs}" for kind, plan, graphs in GRAPHS[1:]))
@pytest.mark.parametrize(("kind", "plan", "graphs"), GRAPHS)
def test_layers_microbatches_and_engines_share_graphs(
    warm_ranks: Warm, kind: str, plan: str, graphs: int
) -> None:
    """Another layer, a second microbatch and a second engine on the same model compile nothing."""
    for added, evaluating, breaks in warm_ranks(Plan.parse(plan).ranks).run(num_graphs, kind, plan):
        assert breaks == {}
        assert added == [graphs, 0, 0, 0]
        assert evaluating == graphs


# Caches.


class Remembering(nn.Module):
    def forward(self, x: Tensor, past_key_values: Any = None) -> Tensor:
        return x if past_key_values is None else x + 1


def generated() -> tuple[int, float]:
    from transformers import DynamicCache

    layer = Remembering()
    wrapper = CompiledForward(layer, None)
    with backend("eager") as compiled:
        output = wrapper(torch.ones(1), past_key_values=DynamicCache())
        num_compiled = len(compiled)
        wrapper(torch.ones(1))
    return len(compiled) - num_compiled, float(output) if not num_compiled else -1.0


def test_a_layer_with_a_cache_runs_as_it_is_written(warm_ranks: Warm) -> None:
    """It writes to the cache by its number: each layer would be compiled by itself, at every length."""
    assert warm_ranks(1).run(generated)[0] == (1, 2.0)


def test_a_cache_is_made_only_for_who_asks() -> None:
    model: Any = models.make("llama")
    ids = models.tokens(0)[0]
    assert model(ids).past_key_values is not None
    model.register_forward_pre_hook(without_cache, with_kwargs=True)
    assert model(ids).past_key_values is None
    assert model(ids, use_cache=True).past_key_values is not None
    names = ("attention_mask", "position_ids", "past_key_values", "inputs_embeds", "labels")
    assert model(ids, *[None] * len(names), True).past_key_values is not None
