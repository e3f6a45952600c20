"""Which losses models of transformers compute themselves."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from echelon.engine.step.batch_reader import BatchReader  # noqa: E402
from echelon.errors import UserError  # noqa: E402
from echelon.nn.huggingface.own_loss import (  # noqa: E402
    causal_cross_entropy,
    counts_labels,
    is_plain_causal_loss,
    label_cross_entropy,
    shift,
    shifts_labels,
    unsplit_causal_cross_entropy,
)
from echelon.parallel.own_loss import OwnLoss, choose_loss, takes_next_labels  # noqa: E402
from echelon.plan import Plan  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def make(name: str, **changes: Any) -> Any:
    model = getattr(transformers, name)
    return model(model.config_class(**SIZES, **changes))


def test_losses_of_logits_and_next_labels_alone() -> None:
    for name in ("LlamaForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM", "GPTNeoXForCausalLM"):
        assert is_plain_causal_loss(make(name)), name
    assert not is_plain_causal_loss(make("MixtralForCausalLM", output_router_logits=True))
    assert not is_plain_causal_loss(make("BertForMaskedLM"))
    assert not is_plain_causal_loss(nn.Linear(2, 2))


def focal(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """A loss function of the user's, a mean over the next labels."""
    losses = nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].flatten(), reduction="none"
    )
    return losses.square().sum() / (labels[:, 1:] != -100).sum()


def test_a_changed_loss_or_forward_is_not_taken_for_the_known_one() -> None:
    torch.manual_seed(0)
    model, tokens = make("LlamaForCausalLM"), torch.randint(0, 16, (3, 5))
    labels = tokens.clone()
    labels[0, 2:], labels[1, 0] = -100, -100
    model.loss_function = focal
    loss = choose_loss(model, None, Plan())
    assert takes_next_labels(loss)
    total, count = loss(model(tokens), shift(labels))  # type: ignore[misc]
    assert (total / count).item() == pytest.approx(model(tokens, labels=labels).loss.item())

    class Own(type(make("LlamaForCausalLM"))):  # type: ignore[misc]
        def forward(self, **inputs: Any) -> Any:
            return super().forward(**inputs)

    assert not is_plain_causal_loss(Own(make("LlamaForCausalLM").config))


def test_which_labels_a_model_counts() -> None:
    assert shifts_labels(make("GPTNeoXForCausalLM"))
    assert shifts_labels(make("MixtralForCausalLM", output_router_logits=True))
    assert not shifts_labels(make("BertForMaskedLM"))
    assert not shifts_labels(make("BertForTokenClassification"))
    assert counts_labels(make("BertForSequenceClassification"))
    assert not counts_labels(nn.Linear(2, 2))
    summed = type("ForCTC", (transformers.PreTrainedModel,), {"config_class": transformers.LlamaConfig})
    model = summed(transformers.LlamaConfig(**SIZES))
    assert not counts_labels(model)
    model.config.ctc_loss_reduction = "sum"
    with pytest.raises(UserError, match="set it to 'mean'"):
        counts_labels(model)


def test_the_loss_is_that_of_the_model() -> None:
    torch.manual_seed(0)
    model = make("LlamaForCausalLM").double()
    tokens = torch.randint(0, 16, (3, 5))
    labels = tokens.clone()
    labels[0, 2:], labels[1, 0] = -100, -100
    total, count = causal_cross_entropy(model(tokens), shift(labels))
    assert count == 1 + 4 + 4
    assert (total / count).item() == model(tokens, labels=labels).loss.item()
    assert shift(torch.tensor([[1, 2, 3]])).tolist() == [[2, 3, -100]]


def test_which_loss_is_chosen() -> None:
    """transformers rounds to float32: in float64, parts of a vocabulary would not give its loss."""
    llama = make("LlamaForCausalLM")
    assert choose_loss(llama, None, Plan()) is causal_cross_entropy
    assert choose_loss(llama, None, Plan.parse("precision=fp64")) is unsplit_causal_cross_entropy
    assert takes_next_labels(choose_loss(llama, None, Plan()))
    assert choose_loss(make("BertForMaskedLM"), None, Plan()) is label_cross_entropy
    assert isinstance(choose_loss(nn.Linear(2, 2), None, Plan()), OwnLoss)
    output = SimpleNamespace(logits=torch.zeros(1, 2, 16))
    targets = torch.tensor([[3, -100]])
    assert unsplit_causal_cross_entropy(output, targets) == causal_cross_entropy(output, targets)


def test_labels_of_a_causal_model_must_be_there() -> None:
    reader = BatchReader(make("LlamaForCausalLM"), Plan(), causal_cross_entropy, by_layers=False)
    tokens = torch.ones(2, 3, dtype=torch.long)
    with pytest.raises(UserError, match=r"LlamaForCausalLM computes its loss of labels, .* NoneType: must"):
        reader.read({"input_ids": tokens})
    _, targets = reader.read((tokens, tokens))
    assert targets.tolist() == [[1, 1, -100]] * 2


def test_layers_cannot_return_a_loss_that_only_the_forward_knows() -> None:
    model = make("LlamaForCausalLM")
    with pytest.raises(UserError, match="runs layer by layer, and its own loss is computed by its forward"):
        BatchReader(model, Plan.parse("pipeline=2"), OwnLoss(model), by_layers=True)
