"""A case builds its model in the type that is asked for, and its batches with it."""

import pickle

import pytest
import torch
from torch import nn

from echelon.verify import Case
from echelon.verify.case import cast_floats
from tests.cases import adamw, mean_loss, perceptron_case, vectors


def test_other_ranks_start_from_other_weights() -> None:
    case = perceptron_case(seed=3)
    first, again, other = case.build(), case.build(), case.build(rank=1)
    assert torch.equal(first.first.weight, again.first.weight)
    assert not torch.equal(first.first.weight, other.first.weight)
    assert first.training


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_model_and_batches_have_the_type_and_types_below_float32_round_the_same_weights(
    dtype: torch.dtype,
) -> None:
    case = perceptron_case(steps=2)
    exact, model = case.build().state_dict(), case.build(dtype=dtype).state_dict()
    assert all(torch.equal(model[name], value.to(dtype)) for name, value in exact.items())
    inputs, targets = case.batches(dtype)[1]
    assert inputs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(targets, vectors(1)[1])
    assert len(case.batches(dtype)) == 2


def test_a_rounded_start_loses_nothing_in_bf16_and_is_one_that_ranks_can_rebuild() -> None:
    case = perceptron_case()
    rounded = pickle.loads(pickle.dumps(case.round_start(torch.bfloat16)))
    start, low = rounded.build(dtype=torch.float32), rounded.build(dtype=torch.bfloat16)
    assert torch.equal(start.first.weight, low.first.weight.float())
    assert torch.equal(low.first.weight, case.build(dtype=torch.bfloat16).first.weight)
    assert not torch.equal(start.first.weight, case.build(dtype=torch.float32).first.weight)


def test_frequencies_of_rotary_positions_are_never_rounded() -> None:
    pytest.importorskip("transformers")
    from tests.nn.huggingface.models import make

    case = Case(lambda: make("llama"), vectors, mean_loss, adamw)
    low, expected = case.build(dtype=torch.bfloat16), make("llama").model.rotary_emb.inv_freq
    assert torch.equal(low.model.rotary_emb.inv_freq, expected)
    assert next(low.parameters()).dtype == torch.bfloat16


def test_only_real_tensors_are_cast() -> None:
    integers, complex_numbers = torch.arange(2), torch.ones(2, dtype=torch.complex64)
    cast = cast_floats({"a": [torch.ones(2), integers], "b": (complex_numbers, "text")}, torch.bfloat16)
    assert cast["a"][0].dtype == torch.bfloat16
    assert cast["a"][1] is integers
    assert cast["b"] == (complex_numbers, "text")


class WithLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.5)


def test_dropout_between_recurrent_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dropout inside lstm: torch draws the masks .* set it to 0"):
        Case(WithLSTM, vectors, mean_loss, adamw).build()
