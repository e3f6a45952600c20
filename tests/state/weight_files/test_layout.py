import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.state.ownership import VALUE, Slice
from echelon.state.weight_files.layout import (
    FileTensor,
    Piece,
    Region,
    WeightLayout,
    Window,
    is_same,
    plain_layout,
    read_pieces,
    whole,
    whole_tensor,
)
from echelon.state.weight_files.tensor_file import TensorEntry


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


# Three matrices joined in one, transposed; and one tensor of two experts' two parts in four.
FUSED = [Piece(n, (0, 0), (4, 5), "fused", (0, 4 * i), is_transposed=True) for i, n in enumerate("qkv")]
STACKED = [
    Piece("experts", (expert, 3 * part, 0), (1, 3, 4), f"expert {expert} part {part}", (0, 0))
    for expert in range(2)
    for part in range(2)
]


def reader(stored: dict[str, Tensor]) -> Callable[[str, Window, Tensor], None]:
    def read(name: str, window: Window, out: Tensor) -> None:
        out.copy_(stored[name][window])

    return read


def test_a_file_tensor_is_joined_by_hand() -> None:
    tensors = {name: torch.rand(4, 5) for name in "qkv"}
    fused = FileTensor("fused", (5, 12), torch.float32, tuple(FUSED))
    assert fused.names == ["q", "k", "v"]
    assert torch.equal(fused.join(tensors), torch.cat(list(tensors.values())).T)


def test_parts_of_a_stack_by_hand() -> None:
    experts = torch.rand(2, 6, 4)
    part = FileTensor("expert 1 part 0", (3, 4), torch.float32, (STACKED[2],))
    assert torch.equal(part.join({"experts": experts}), experts[1, :3])


def test_a_tensor_that_is_the_same_is_not_copied() -> None:
    tensor = torch.rand(4, 5)
    same = FileTensor("b", (4, 5), torch.float32, (Piece("a", (0, 0), (4, 5), "b", (0, 0)),))
    assert same.join({"a": tensor}) is tensor


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Slice:
    ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Slice("a", VALUE, shape, tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


@given(boxes((4, 5)), st.sampled_from("qkv"))
def test_any_box_of_a_matrix_that_is_joined_and_transposed(box: Slice, name: str) -> None:
    stored = torch.rand(5, 12)
    out = torch.full(box.sizes, -1.0)
    read_pieces([piece for piece in FUSED if piece.name == name], box, out, reader({"fused": stored}))
    ours = dict(zip("qkv", stored.T.split(4), strict=True))
    assert torch.equal(out, ours[name][box.box])


@given(boxes((2, 6, 4)))
def test_any_box_of_a_stack(box: Slice) -> None:
    stored = {piece.stored: torch.rand(3, 4) for piece in STACKED}
    experts = torch.stack([torch.cat([stored[f"expert {e} part {p}"] for p in range(2)]) for e in range(2)])
    out = torch.full(box.sizes, -1.0)
    read_pieces(STACKED, box, out, reader(stored))
    assert torch.equal(out, experts[box.box])


def test_a_scalar() -> None:
    out = torch.empty(())
    read_pieces([Piece("a", (), (), "b", ())], whole(()), out, reader({"b": torch.tensor(7.0)}))
    assert out == 7.0


def test_a_box_that_reaches_beyond_the_tensor_is_refused() -> None:
    box = Region((2, 0), (3, 5))
    with pytest.raises(UserError, match=r"\[3, 5\] at \[2, 0\]: the files hold 10 of its 15 elements"):
        read_pieces([FUSED[0]], box, torch.empty(3, 5), reader({"fused": torch.rand(5, 12)}))


def test_another_name_in_the_file_changes_nothing_else() -> None:
    fused = FileTensor("fused", (5, 12), torch.float32, tuple(FUSED))
    renamed = fused.renamed("other")
    assert renamed == FileTensor(
        "other", (5, 12), torch.float32, tuple(piece._replace(stored="other") for piece in FUSED)
    )
    assert (fused.name, {piece.stored for piece in fused.pieces}) == ("fused", {"fused"})


def test_a_tensor_of_several_types_has_the_wider_one() -> None:
    types = (torch.float32, torch.float64, torch.bfloat16)
    tensors = {name: torch.rand(4, 5).to(dtype) for name, dtype in zip("qkv", types, strict=True)}
    fused = FileTensor("fused", (5, 12), torch.float32, tuple(FUSED))
    assert fused.join(tensors).dtype == torch.float64


@pytest.mark.parametrize(
    ("pieces", "stored", "shape", "is_theirs"),
    [
        ([Piece("a", (0, 0), (4, 4), "b", (0, 0))], (4, 4), (4, 4), True),
        ([Piece("a", (0, 0), (4, 4), "b", (0, 0), is_transposed=True)], (4, 4), (4, 4), False),
        ([Piece("a", (0, 0), (4, 4), "b", (0, 0))], (8, 4), (4, 4), False),
        ([Piece("a", (0, 0), (4, 4), "b", (0, 0))], (4, 4), (8, 4), False),
        ([Piece("a", (0, 0), (4, 4), "b", (0, 0))] * 2, (4, 4), (4, 4), False),
    ],
)
def test_whether_a_file_has_a_tensor_as_it_is(
    pieces: list[Piece], stored: tuple[int, int], shape: tuple[int, int], is_theirs: bool
) -> None:
    assert is_same(pieces, stored, shape) is is_theirs


def test_a_box_beside_a_piece_has_nothing_of_it() -> None:
    """Not even an empty part, which would be read for nothing."""
    piece = Piece("a", (2, 0), (2, 5), "b", (7, 1))
    assert piece.overlap(Region((0, 0), (2, 5))) is None
    assert piece.overlap(Region((4, 0), (1, 5))) is None
    assert piece.overlap(Region((1, 3), (2, 2))) == (
        (slice(1, 2), slice(0, 2)),
        (slice(7, 8), slice(4, 6)),
    )
