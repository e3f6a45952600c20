"""Models of transformers as layers: the same numbers as their own forward, and the same training.

Nothing is downloaded. A few steps each here; twenty, and all plans, by `make fuzz`.
"""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.engine import parallelize
from echelon.engine.within import Within
from echelon.errors import UserError
from echelon.layering import how_to_list, listed_layers
from echelon.mesh import Mesh
from echelon.models import cross_entropy
from echelon.pipeline_parallel import even_boundaries, split
from echelon.plan import Plan
from echelon.planner import profile
from echelon.sequence import View, assign
from echelon.verify import assert_equal
from echelon.wrapping import Wrapping
from tests.cases import adamw

transformers = pytest.importorskip("transformers")

from tests.layering.models import KINDS, SEQUENCE, VOCAB, case, make, tokens  # noqa: E402

ALL = sorted(KINDS)


def double(kind: str, attention: str = "sdpa", **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return make(kind, attention, **changes).double()


def chained(model: nn.Module, value: Any) -> Any:
    for layer in listed_layers(model):
        value = layer(value)
    return value


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize(("attention", "tied"), [("sdpa", True), ("sdpa", False), ("eager", False)])
@pytest.mark.parametrize("kind", ALL)
def test_the_layers_in_a_row_are_the_models_own_forward(kind: str, attention: str, tied: bool) -> None:
    model, (inputs, targets) = double(kind, attention, tie_word_embeddings=tied), tokens(0)
    own, ours = model(inputs), chained(model, inputs)
    assert type(ours) is type(own)
    assert own.logits.std() > 0.1
    assert torch.equal(ours.logits, own.logits)
    cross_entropy(own, targets)[0].backward()
    expected = gradients(model)
    cross_entropy(ours, targets)[0].backward()
    found = gradients(model)
    assert found.keys() == expected.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(found[name], its) for name, its in expected.items())


@pytest.mark.parametrize("kind", ALL)
def test_the_layers_hold_the_models_own_parts_and_nothing_else(kind: str) -> None:
    model = double(kind, tie_word_embeddings=True)
    layers = listed_layers(model)
    assert len(layers) == model.config.num_hidden_layers + 2
    assert {p for layer in layers for p in layer.parameters()} == set(model.parameters())
    assert [its for layer in layers for its in layer.buffers()] == []
    tied = set(layers[0].parameters()) & set(layers[-1].parameters())
    assert tied == {model.get_input_embeddings().weight}


def test_windows_are_seen() -> None:
    """The families with a window and without it differ: the tests above would not find a forgotten mask."""
    model, inputs = double("mistral"), tokens(0)[0]
    narrow = chained(model, inputs).logits
    model.config.sliding_window = None
    assert not torch.allclose(chained(model, inputs).logits[:, 3:], narrow[:, 3:])
    torch.testing.assert_close(chained(model, inputs).logits[:, :3], narrow[:, :3], rtol=0, atol=1e-12)


def test_gradient_checkpointing_of_transformers_stays_on() -> None:
    model, (inputs, targets) = double("llama").train(), tokens(0)
    cross_entropy(model(inputs), targets)[0].backward()
    expected = gradients(model)
    model.gradient_checkpointing_enable()
    cross_entropy(chained(model, inputs), targets)[0].backward()
    torch.testing.assert_close(gradients(model), expected, rtol=0, atol=1e-12)


def test_stages_keep_the_names_of_the_model() -> None:
    model = double("llama", tie_word_embeddings=True)
    stages, ties = split(model, even_boundaries(model, 2))
    assert [tie.name for tie in ties] == ["model.embed_tokens.weight"]
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert set(names) == dict(model.named_parameters()).keys()


def test_layers_are_measured() -> None:
    measured = profile(double("gpt2", tie_word_embeddings=True), tokens(0), repeats=1, warmups=0)
    assert len(measured.nodes) == 5


def test_frequencies_of_positions_keep_their_digits_in_low_precision() -> None:
    model = make("llama")
    before = model.model.rotary_emb.inv_freq.clone()
    parallelize(model, "precision=bf16", optimizer=adamw, loss=cross_entropy)
    assert model.model.norm.weight.dtype == torch.bfloat16
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


# What is not taken.


class Own(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Renamed(transformers.LlamaForCausalLM):
    pass


def test_a_subclass_is_known_unless_it_has_a_forward_of_its_own() -> None:
    config = double("llama").config
    assert len(listed_layers(Renamed(config))) == 5
    assert listed_layers(Own(config)) == []


def test_other_architectures_list_no_layers_and_are_told_which_do() -> None:
    config = transformers.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        ffn_dim=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        word_embed_proj_dim=16,
    )
    model = transformers.OPTForCausalLM(config)
    assert listed_layers(model) == []
    with pytest.raises(UserError, match=r"OPTForCausalLM lists no layers.*LlamaForCausalLM, Qwen2"):
        even_boundaries(model, 2)


@pytest.mark.parametrize("name", ["output_router_logits", "output_hidden_states"])
def test_what_needs_all_layers_in_one_place_is_refused_by_pipelines(name: str) -> None:
    model = double("mixtral", **{name: True})
    with pytest.raises(UserError, match=f"asks for {name}.*set model.config.{name} = False"):
        even_boundaries(model, 2)
    setattr(model.config, name, False)
    assert how_to_list(model) == ""
    assert even_boundaries(model, 2) == [3]


def test_more_tokens_than_positions_are_refused() -> None:
    inputs = torch.zeros(1, 17, dtype=torch.int64)
    with pytest.raises(UserError, match="17 tokens: this model has learned 16 positions"):
        chained(double("gpt2"), inputs)


def test_hooks_on_the_model_are_refused_where_its_forward_is_not_called() -> None:
    model = double("llama")
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(UserError, match="forward hooks"):
        parallelize(model, "zero=1", optimizer=adamw, loss=cross_entropy)


@pytest.mark.parametrize("name", ["model", "model.embed_tokens", "model.rotary_emb"])
def test_hooks_inside_the_model_are_refused_where_they_would_not_run(name: str) -> None:
    """Of a trunk they were left out in silence."""
    model = double("llama")
    model.get_submodule(name).register_forward_hook(lambda *_: None)
    if name == "model":
        with pytest.raises(UserError, match="forward hooks of model: "):
            parallelize(model, "zero=1", optimizer=adamw, loss=cross_entropy)
    else:
        parallelize(model, "zero=1", optimizer=adamw, loss=cross_entropy)


@pytest.mark.parametrize("name", ["", "model"])
def test_a_forward_that_was_replaced_lists_no_layers(name: str) -> None:
    model = double("llama")
    module = model.get_submodule(name)
    module.forward = module.forward
    assert listed_layers(model) == []
    with pytest.raises(UserError, match=f"its {name}{'.' * bool(name)}forward is not that of transformers"):
        even_boundaries(model, 2)


def test_a_model_that_returns_all_layers_is_told_how_not_to() -> None:
    """With context=2 it was told to be an nn.Sequential."""
    model = double("llama", output_hidden_states=True)
    with pytest.raises(UserError, match=r"set model\.config\.output_hidden_states = False"):
        Within(model, Mesh.pretend(Plan(context=2), 0), cross_entropy, None, Wrapping())


def test_routers_that_draw_are_refused_where_ranks_split_their_experts() -> None:
    model = double("mixtral", router_jitter_noise=0.1)
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp.* draw at random inside"):
        Within(model, Mesh.pretend(Plan(tensor=2), 0), cross_entropy, None, Wrapping())


def test_transformers_is_not_needed() -> None:
    code = (
        "import sys, torch, echelon.layering as l, echelon.dropout as d; from torch import nn; "
        "assert l.listed_layers(nn.Linear(2, 2)) == d.unkeyed_dropout(nn.Linear(2, 2)) == []; "
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Sequences over several ranks.


class Spread(View):
    """As if there were two ranks, of which this one has all positions, in another order."""

    parts = 2

    def __init__(self) -> None:
        self.calls = 0
        self.order = torch.arange(SEQUENCE).flip(0)

    def positions(self, length: int, device: torch.device) -> Tensor:  # noqa: ARG002
        assert length == SEQUENCE
        return self.order

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        self.calls += 1
        back = self.order.argsort()
        straight = [its[:, :, back] for its in (query, key, value)]
        return super().attend(*straight, scale)[:, :, self.order]


def spread_over(model: nn.Module, view: View, value: Any) -> Any:
    for layer in listed_layers(model):
        assign(layer, view)
        value = layer(value)
    return value


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "gpt2"])
def test_attention_and_positions_go_by_the_view(kind: str, attention: str) -> None:
    model, inputs, view = double(kind, attention), tokens(0)[0], Spread()
    found = spread_over(model, view, inputs[:, view.order]).logits[:, view.order.argsort()]
    assert view.calls == model.config.num_hidden_layers
    assert model.config._attn_implementation == attention
    tolerance = 1e-12 if attention == "sdpa" else 1e-5  # there it makes its softmax in float32
    torch.testing.assert_close(found, model(inputs).logits, rtol=0, atol=tolerance)


def test_the_choice_of_attention_is_put_back_after_a_failure() -> None:
    class Failing(Spread):
        def attend(self, *_: Any) -> Tensor:
            raise RuntimeError("lost")

    model = double("llama")
    with pytest.raises(RuntimeError, match="lost"):
        spread_over(model, Failing(), tokens(0)[0])
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("kind", "changes", "told"),
    [
        ("mistral", {}, "sliding_window=3 with sequences of 16 tokens"),
        ("llama", {"attention_dropout": 0.1}, "dropout of 0.1 on attention's weights"),
        ("gpt2", {"attn_pdrop": 0.1}, "dropout of 0.1 on attention's weights"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type=dynamic"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused(kind: str, changes: dict[str, Any], told: str) -> None:
    model = double(kind, **changes).train()
    with pytest.raises(UserError, match=told):
        spread_over(model, Spread(), tokens(0)[0])


def test_a_window_as_long_as_the_sequence_is_none() -> None:
    model, inputs, view = double("mistral", sliding_window=2 * SEQUENCE), tokens(0)[0], Spread()
    found = spread_over(model, view, inputs[:, view.order]).logits[:, view.order.argsort()]
    torch.testing.assert_close(found, model(inputs).logits, rtol=0, atol=1e-12)


# The contract.

PLANS = [
    "pipeline=2 schedule=1f1b microbatches=2",
    "data=2 zero=1",
    "data=2 zero=3",
    "pipeline=2 data=2 microbatches=2",
]


def prove(kind: str, plan: str, **changes: Any) -> None:
    verdict = assert_equal(case(kind, **changes), plan)
    print(f"{verdict.worst[1]:.1e} {kind} {verdict.plan}")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_training_is_equal_to_one_device(kind: str, plan: str) -> None:
    prove(kind, plan, steps=3, tie_word_embeddings=True)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral", "mixtral"])
def test_every_family_trains_in_stages(kind: str) -> None:
    prove(kind, PLANS[0], steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "plan",
    [
        *PLANS,
        "data=2",
        "data=2 zero=2",
        "pipeline=2 data=2 zero=1 microbatches=2",
        "pipeline=2 data=2 zero=3 microbatches=2",
        "pipeline=2 schedule=interleaved chunks=2 microbatches=2",
        "pipeline=3 schedule=zero-bubble microbatches=4",
        "pipeline=2-1 microbatches=3",
        "pipeline=auto microbatches=2",
    ],
)
@pytest.mark.parametrize("kind", ALL)
def test_every_family_is_equal_under_every_plan(kind: str, plan: str, tied: bool) -> None:
    prove(kind, plan, tie_word_embeddings=tied)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
def test_eager_attention_too(kind: str) -> None:
    prove(kind, PLANS[0], attention="eager")


def test_dropout_of_gpt2_is_keyed_in_every_layout() -> None:
    prove("gpt2", PLANS[0], steps=2, resid_pdrop=0.1, embd_pdrop=0.1)


def names_and_type(kind: str, plan: str) -> tuple[list[str], str]:
    torch.manual_seed(0)
    seen = []

    def loss(output: Any, targets: Tensor) -> Any:
        seen.append(type(output).__name__)
        return cross_entropy(output, targets)

    engine = parallelize(make(kind), plan, optimizer=adamw, loss=loss)
    engine.step(engine.local(tokens(0)))
    return list(engine.full_state_dict()), " ".join(set(seen))


@pytest.mark.parametrize("kind", ["mixtral", "gpt2"])
def test_state_dicts_have_the_original_names_and_losses_see_the_original_type(
    kind: str, warm_ranks: Any
) -> None:
    names = list(make(kind).state_dict())
    found = warm_ranks(2).run(names_and_type, kind, "pipeline=2 microbatches=2 precision=fp32")
    own = type(make(kind)(tokens(0)[0])).__name__
    assert [its for its, _ in found] == [names, names]
    assert [kinds for _, kinds in found] == ["", own]
