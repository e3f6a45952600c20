import weakref

import torch
from torch import Tensor, nn

from echelon.state.weight_files import (
    FileTensor,
    Piece,
    TensorEntry,
    WeightLayout,
    plain_layout,
    whole_tensor,
)


class Model(nn.Module):
    """Tied weights, a buffer of integers, and one that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.second = nn.Linear(3, 2, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("counts", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)


def headers(model: nn.Module, *without: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if name not in without}


def test_files_with_the_names_of_the_state_dict() -> None:
    layout = plain_layout(Model())
    assert list(layout.tensors) == ["counts", "first.weight", "first.bias"]
    assert layout.ties == {"second.weight": "first.weight"}
    assert layout.errors(headers(Model(), "second.weight")) == []
    assert layout.pieces_of("second.weight") == layout.pieces_of("first.weight")


def test_of_tied_names_the_files_may_have_either_or_both() -> None:
    only_second = headers(Model(), "first.weight")
    layout = plain_layout(Model(), only_second)
    assert (layout.ties, layout.copies) == ({"first.weight": "second.weight"}, {})
    assert layout.errors(only_second) == []
    both = plain_layout(Model(), headers(Model()))
    assert both.copies == {"second.weight": "first.weight"}
    assert both.errors(headers(Model())) == []


def test_all_errors_at_once() -> None:
    found = headers(Model(), "second.weight", "first.bias") | {"extra": torch.zeros(1)}
    found |= {"first.weight": torch.zeros(2, 4, dtype=torch.int8), "counts": torch.zeros(4)}
    assert plain_layout(Model()).errors(found) == [
        "first.bias: is missing",
        "extra: is not a tensor of this model",
        "counts: is torch.float32, must be torch.int64",
        "first.weight: has shape [2, 4], must be [2, 3]",
        "first.weight: is torch.int8, must be floating point (quantised weights are not read)",
    ]


def test_tensors_in_unreadable_files_are_not_said_to_be_missing() -> None:
    found = headers(Model(), "second.weight", "first.bias")
    assert plain_layout(Model()).errors(found, unreadable={"first.bias"}) == []


def test_what_is_no_tensor_is_an_error() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 1}

        def set_extra_state(self, state: dict[str, int]) -> None:
            raise AssertionError(state)

    model = Extra(2, 2)
    said = ["_extra_state: is a dict in the model, and files hold tensors only"]
    assert plain_layout(model).errors({"weight": model.weight, "bias": model.bias}) == said


def halves() -> WeightLayout:
    """One tensor in two files' tensors, between two plain ones."""
    parts = [
        FileTensor(f"half {i}", (2,), torch.float32, (Piece("b", (2 * i,), (2,), f"half {i}", (0,)),))
        for i in range(2)
    ]
    plain = [whole_tensor(name, torch.empty(3), name) for name in "ac"]
    return WeightLayout({tensor.name: tensor for tensor in (plain[0], *parts, plain[1])})


def test_parts_of_one_tensor_have_one_type() -> None:
    found = {
        "a": torch.zeros(3),
        "half 0": torch.zeros(2),
        "half 1": torch.zeros(2).half(),
        "c": torch.zeros(3),
    }
    said = "b: its parts in the files are of several types, torch.float16, torch.float32; must be of one"
    assert halves().errors(found) == [said]


def test_what_to_write() -> None:
    dtypes = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float64}
    assert halves().entries(dtypes) == [
        TensorEntry("a", (3,), torch.float32),
        TensorEntry("half 0", (2,), torch.bfloat16),
        TensorEntry("half 1", (2,), torch.bfloat16),
        TensorEntry("c", (3,), torch.float64),
    ]


def test_writing_fetches_each_tensor_once_and_keeps_none() -> None:
    fetched: list[str] = []
    references: list[weakref.ref[Tensor]] = []

    def fetch(name: str) -> Tensor:
        assert all(reference() is None for reference in references)
        tensor = torch.arange(4.0 if name == "b" else 3.0)
        fetched.append(name)
        references.append(weakref.ref(tensor))
        return tensor

    written = []
    for tensor in halves().joined(fetch):
        written.append(tensor.tolist())
        del tensor  # as the writer does
    assert written == [[0, 1, 2], [0, 1], [2, 3], [0, 1, 2]]
    assert fetched == halves().needed_names() == ["a", "b", "c"]


def test_a_state_dict_instead_of_the_model() -> None:
    state: dict[str, object] = {"a": torch.zeros(2), "b": 3}
    layout = plain_layout(Model(), state=state)
    assert list(layout.tensors) == ["a"]
    assert layout.problems == ["b: is a int in the model, and files hold tensors only"]


def test_constants_that_nobody_reads_are_no_error() -> None:
    plain = whole_tensor("a", torch.empty(3), "a")
    layout = WeightLayout({"a": plain}, ignored=("mask",))
    assert layout.errors({"a": torch.zeros(3), "mask": torch.zeros(9)}) == []
    assert layout.errors({"a": torch.zeros(3).half()}) == []


def test_numbers_of_the_right_type() -> None:
    for dtype, num_errors in ((torch.int64, 0), (torch.int32, 1), (torch.float32, 1)):
        found = headers(Model(), "second.weight") | {"counts": torch.zeros(4, dtype=dtype)}
        assert len(plain_layout(Model()).errors(found)) == num_errors
