"""Tables that are refused: each was accepted once, and did not train as one device does."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from echelon.collectives import RecordingGroup
from echelon.errors import UserError
from echelon.nn.wrapping import Wrapping
from echelon.parallel.tensor.split import Sharded, split_over
from echelon.parallel.tensor.styles import Table


def split(model: nn.Module, table: Table, *, sequence: bool = False) -> Sharded:
    """Over two ranks, of which this is the first."""
    first = list(model[0].modules()) if sequence and isinstance(model, nn.Sequential) else []
    group = RecordingGroup("tensor", 0, 2)
    return split_over(
        model, group, table, Wrapping(), sequence=sequence, whole_sequence=first, join_logits=True
    )


def refused(model: nn.Module, table: Table, *, sequence: bool = False) -> list[str]:
    with pytest.raises(UserError) as caught:
        split(model, table, sequence=sequence)
    return list(caught.value.errors)


# Members of a list, whose names differ only by a number, were taken for alike: only the first was checked.


def test_every_member_of_a_list_must_be_known() -> None:
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 32))
    (error,) = refused(model, {"0": "vocabulary", "3": "vocabulary"})
    assert error.startswith("no table knows 1 module (*)")
    assert "tensor_table={\n        '1': 'replicated',\n    }" in error  # and not '*'


def test_every_member_of_a_list_must_divide() -> None:
    model = nn.Sequential(nn.Embedding(33, 16), nn.Linear(16, 32), nn.Linear(32, 33))
    errors = refused(model, {"0": "vocabulary", "1": "column", "2": "column"})
    assert [error.split(":")[0] for error in errors] == ["2.weight", "2.bias"]
    assert "its split dim of 33 is not divisible by 2; make it 34, or use fewer ranks" in errors[0]


def test_members_that_are_alike_are_reported_once() -> None:
    """A model of 28 layers had 28 errors for each of its modules."""
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6)) for _ in range(28)))
    (error,) = refused(model, {})
    assert "no table knows 56 modules (*.*)" in error
    assert error.count("replicated',") == 1


# The advice is right wherever the module stands.


@pytest.mark.parametrize("between", [nn.Dropout(0.1), nn.PReLU()])
def test_the_advice_names_the_style_between_a_column_and_a_row(between: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 8), between, nn.Linear(8, 4))
    (error,) = refused(model, {"0": "column", "2": "row"})
    assert "A dropout or a weight between a column and a row is 'inner' or 'heads'." in error
    split(model, {"0": "column", "1": "inner", "2": "row"})


def test_inner_is_for_what_works_on_each_feature() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout1d(0.1), nn.Linear(8, 4))
    errors = refused(model, {"0": "column", "1": "inner", "2": "inner", "3": "row"})
    assert errors == [
        "1 (LayerNorm): cannot be 'inner', since it needs all features together; make it 'replicated', and "
        "the matrices around it too",
        "2 (Dropout1d): cannot be 'inner', since it drops whole channels; use nn.Dropout there",
    ]


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_the_dropout_inside_of_torchs_layers_is_inner(kind: type[nn.Module]) -> None:
    table = {"linear1": "column", "linear2": "row", "dropout": "replicated", "*": "replicated"}
    assert refused(kind(4, 2, 8), table) == [
        "dropout: is between a column and a row, and cannot be 'replicated'; make it 'inner'"
    ]
    split(kind(4, 2, 8), table | {"dropout": "inner"})


def test_weights_that_torchs_attention_reads_stay_whole() -> None:
    (error,) = refused(nn.MultiheadAttention(4, 2), {"": "replicated", "out_proj": "row"})
    assert error == (
        "out_proj (NonDynamicallyQuantizableLinear): torch's attention reads its weights and does not call "
        "it; make it 'replicated'"
    )


def test_a_region_has_no_weights() -> None:
    (error,) = refused(nn.LayerNorm(4), {"": "region"})
    assert "the model (LayerNorm): cannot be 'region', which is for modules without weights" in error


# A forward of its own would be replaced.


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Renamed(nn.Linear):
    """Has nothing of its own but its name."""


class Shifted(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + 1


@pytest.mark.parametrize("style", ["column", "row", "vocabulary"])
def test_a_forward_of_its_own_is_not_taken_away(style: str) -> None:
    assert refused(nn.Sequential(Scaled(4, 4)), {"0": style}) == [
        f"0 (Scaled): cannot be '{style}': its own forward would be lost; make it 'replicated', or a plain "
        "nn.Linear"
    ]
    split(nn.Sequential(Renamed(4, 4)), {"0": style})


def test_a_forward_of_an_embedding_or_an_instance_is_not_taken_away() -> None:
    (error,) = refused(nn.Sequential(Shifted(4, 4)), {"0": "vocabulary"})
    assert error.endswith("make it 'replicated', or a plain nn.Embedding")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].forward = torch.tanh  # type: ignore[assignment]
    (error,) = refused(model, {"0": "column", "1": "column"})
    assert error.startswith("1 (Linear): cannot be 'column': its own forward would be lost")


def test_what_is_split_already_is_not_split_again() -> None:
    model = nn.Sequential(nn.Linear(4, 8))
    split(model, {"0": "column"})
    (error,) = refused(model, {"0": "column"})
    assert error == (
        "0 (Linear): cannot be 'column': another engine has split it already; close that engine first"
    )


def test_a_weight_that_is_computed_cannot_be_cut() -> None:
    (error,) = refused(nn.Sequential(weight_norm(nn.Linear(4, 4))), {"0": "column", "0.*": "replicated"})
    assert "its weight is computed from other parameters" in error


# Sharing.


def tied(first: nn.Module, second: nn.Module) -> nn.Sequential:
    second.weight = first.weight
    return nn.Sequential(first, second)


@pytest.mark.parametrize("styles", [("column/3", "column"), ("column", "row"), ("column", "replicated")])
def test_tied_weights_are_cut_alike(styles: tuple[str, str]) -> None:
    (error,) = refused(tied(nn.Linear(6, 6), nn.Linear(6, 6)), dict(zip("01", styles, strict=True)))
    assert error == "0 and 1 share a parameter, and their styles split it differently"


@pytest.mark.parametrize(("style", "sequence"), [("heads", False), ("inner", False), ("replicated", True)])
def test_tied_weights_have_gradients_of_one_kind(style: str, sequence: bool) -> None:
    """The sum over ranks would count one of them once for each rank, or leave parts of the other out."""
    table = {"0": "replicated", "1": style, "2": "replicated"}
    (error,) = refused(tied(nn.PReLU(), nn.PReLU()), {n: table[n] for n in "01"}, sequence=sequence)
    assert error == (
        "0 and 1 share a parameter, and a rank has all of its gradient in one of them, but a part of it in "
        "the other; do not share it"
    )


def test_one_module_has_one_style() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": shared})
    assert refused(model, {"a": "column", "b": "row"}) == [
        "b is 'row' in the table, and 'column' by another name; give it one style"
    ]
    assert len(split(model, {"b": "column"}).shards) == 2


def test_a_table_may_name_what_a_model_was_made_without() -> None:
    """nn.Identity has no style, and was taken for a module with two."""
    model = nn.ModuleDict({"norm": nn.Identity(), "matrix": nn.Linear(4, 4)})
    assert len(split(model, {"norm": "replicated", "matrix": "column"}).shards) == 2


@pytest.mark.parametrize("shared", [nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.1)])
def test_with_split_sequences_the_first_layer_shares_no_module(shared: nn.Module) -> None:
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared, nn.Tanh()))
    (error,) = refused(model, {"*.0": "replicated"}, sequence=True)
    assert error == (
        f"0.0 ({type(shared).__name__}): is in the first layer, which gets whole sequences, and in a later "
        "one, which with sequence=true gets a part of them; give each layer its own, or use sequence=false"
    )
    split(model, {"*.0": "replicated"})


@pytest.mark.parametrize("mixing", [nn.MultiheadAttention(4, 2), nn.GRU(4, 4), nn.Conv1d(4, 4, 1)])
def test_what_mixes_positions_needs_them_all(mixing: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 4), mixing)
    (error,) = refused(model, {"*": "replicated"}, sequence=True)
    assert error == (
        f"1 ({type(mixing).__name__}): needs all positions, and with sequence=true gets a part; use "
        "sequence=false"
    )
    split(nn.Sequential(mixing, nn.Linear(4, 4)), {"*": "replicated"}, sequence=True)


# Words, names and numbers.


@pytest.mark.parametrize("text", ["column/0", "column/", "column/x", "column/²", "column/-1"])
def test_a_column_is_one_matrix_or_more(text: str) -> None:
    with pytest.raises(UserError, match="a column is 1 matrix or more; write 'column', or 'column/3'"):
        split(nn.Linear(4, 4), {"": text})


class Heads(nn.Linear):
    def __init__(self, heads: object) -> None:
        super().__init__(4, 4)
        self.num_heads = heads


def test_lines_that_match_nothing_are_reported_with_names_that_are_near() -> None:
    model = nn.Sequential()
    model.add_module("layers", nn.ModuleList([Heads(4)]))
    table = {"layers.*": "column", "leyers.*": "column", "layers.*.n_heads": "divided", "x": "row"}
    assert refused(model, table) == [
        "'leyers.*': 'column' in the table matches no module of the model; drop it, or fix the name (near: "
        "layers.*, layers.0, layers)",
        "'layers.*.n_heads': 'divided' in the table matches no number of the model; drop it, or fix the name "
        "(near: layers.*.num_heads, layers.0.num_heads, layers.*.in_features)",
        "'x': 'row' in the table matches no module of the model; drop it, or fix the name",
    ]


def test_a_number_is_divided_once() -> None:
    model = nn.Sequential(Heads(8))
    split(model, {"0": "column", "0.num_heads": "divided", "*.num_heads": "divided"})
    assert model[0].num_heads == 4


@pytest.mark.parametrize("value", ["four", 2.0, 0, -3, True])
def test_only_positive_integers_are_divided(value: object) -> None:
    (error,) = refused(nn.Sequential(Heads(value)), {"0": "column", "0.num_heads": "divided"})
    assert error == f"0.num_heads={value!r}: only a positive integer can be 'divided'; drop it"


def test_a_number_that_is_none_stays() -> None:
    model = nn.Sequential(Heads(None))
    split(model, {"0": "column", "0.num_heads": "divided"})
    assert model[0].num_heads is None


# Hooks on the gradient of a weight were lost with the parameter that the part replaced.


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_split_weight_is_refused(register: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4))
    getattr(model[1].weight, register)(lambda _: None)
    getattr(model[2].weight, register)(lambda _: None)  # whole on every rank
    (error,) = refused(model, {"0": "column", "1": "row", "2": "replicated"})
    assert error.startswith("1.weight: has a hook on its gradient")
    split(model, {"0": "replicated", "1": "replicated", "2": "replicated"})
