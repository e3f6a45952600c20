from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from echelon.errors import UserError
from echelon.state.ownership import VALUE, Slice
from echelon.state.weight_files.pieces import FileTensor, Piece, Region, Window, is_same, read_pieces, whole

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
