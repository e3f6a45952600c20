"""Encoders of transformers, and T5: as layers the numbers of their own forward, and split as one device."""

import pytest
import torch

from echelon.collectives.mesh import Mesh
from echelon.errors import UserError
from echelon.models import cross_entropy
from echelon.nn.huggingface.modules import draws_by_function
from echelon.nn.layering import how_to_list, listed_layers
from echelon.nn.wrapping import Wrapping
from echelon.parallel.layer_sharding import LayerSharding
from echelon.parallel.pipeline import even_boundaries
from echelon.plan import Plan
from echelon.verify import assert_equal
from tests.nn.huggingface.encoders import KINDS, batch, case, double, make
from tests.nn.huggingface.models import chained

ENCODERS = [kind for kind in KINDS if kind != "t5"]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ENCODERS)
def test_the_layers_in_a_row_are_the_models_own_forward(kind: str, attention: str) -> None:
    model, (inputs, _) = double(kind, attn_implementation=attention).eval(), batch(kind, 0)
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    own, ours = model(inputs), chained(model, inputs)
    assert type(ours) is type(own)
    assert own.logits.std() > 0.1
    assert torch.equal(ours.logits, own.logits)
    parameters = {p for layer in listed_layers(model) for p in layer.parameters()}
    assert parameters == set(model.parameters())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_goes_on_with_the_hidden_states(attention: str) -> None:
    model, (inputs, _) = double("bert", attn_implementation=attention).eval(), batch("bert", 0)
    mask = (torch.arange(inputs.shape[1]) < torch.tensor([[8], [5], [3], [8], [1]])).long()
    first, *others = listed_layers(model)
    value = first(input_ids=inputs, attention_mask=mask, token_type_ids=inputs % 2)
    for layer in others:
        value = layer(value)
    own = model(input_ids=inputs, attention_mask=mask, token_type_ids=inputs % 2)
    assert torch.equal(value.logits, own.logits)
    assert not torch.allclose(own.logits, model(inputs).logits)


def test_a_decoder_of_berts_class_lists_no_layers() -> None:
    with pytest.raises(UserError, match="is_decoder=True, and is that of an encoder here; set it to False"):
        even_boundaries(make("bert-classes", is_decoder=True), 2)


def test_an_encoder_with_a_decoder_is_no_chain_of_layers() -> None:
    assert "every layer of the decoder takes what the encoder returned" in how_to_list(make("t5"))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(context=2), "no module of its layers asks a view"),
        (Plan(tensor=2, sequence=True), "has matrices, of which none is split, so it would get only a part"),
    ],
)
def test_sequences_are_not_split_where_every_position_attends_to_all(plan: Plan, message: str) -> None:
    model = make("bert", hidden_dropout_prob=0.0)
    with pytest.raises(UserError, match=message):
        LayerSharding(model, Mesh.pretend(plan, 0), cross_entropy, None, Wrapping())


def test_attention_of_bert_reads_only_the_rate_of_its_dropout() -> None:
    """It was taken for a module that is called, whose masks are the same in every layout."""
    attention = make("bert", attention_probs_dropout_prob=0.1).bert.encoder.layer[0].attention  # type: ignore[union-attr,index]
    assert draws_by_function(attention.self)  # type: ignore[union-attr]
    assert not draws_by_function(attention.output)  # type: ignore[union-attr]


@pytest.mark.slow_cases("t5-tensor=2")
@pytest.mark.usefixtures("warm_contract")
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("bert", "tensor=2"),
        ("t5", "tensor=2"),
        pytest.param("vit", "pipeline=2 tensor=2 microbatches=2", marks=pytest.mark.slow),
        *(
            pytest.param(kind, plan, marks=pytest.mark.slow)
            for kind in ENCODERS
            for plan in ("tensor=2", "pipeline=2 microbatches=2", "data=2 zero=3", "data=2 tensor=2 zero=1")
        ),
        pytest.param("t5", "data=2 tensor=2 zero=1", marks=pytest.mark.slow),
    ],
)
def test_training_is_equal_to_one_device(kind: str, plan: str) -> None:
    verdict = assert_equal(case(kind), plan)
    print(f"{verdict.worst[1]:.1e} {kind} {verdict.plan}")
