"""A tape repeats what was done to one tensor, whatever was done to others."""

import pytest
import torch
from torch import Tensor

from echelon.errors import UserError
from echelon.nn.initialization.tape import Tape, Window, key_of

CPU = torch.device("cpu")


def seed_of(note: int) -> int:
    return key_of("seed", note)


def replayed(tape: Tape, tensor: Tensor) -> Tensor:
    return tape.values(Window.of(tensor), CPU, seed_of)


def test_views_changes_in_place_and_results_of_others() -> None:
    tape = Tape()
    with torch.device("meta"), tape:
        base = torch.arange(12.0).view(3, 4)
        base[1].fill_(7.0)
        base.t()[0].add_(1.0)
        column = base[:, 1]
        derived = base @ base.t() + column
        base.mul_(0.0)  # after derived was made from it
    expected = torch.arange(12.0).view(3, 4)
    expected[1].fill_(7.0)
    expected.t()[0].add_(1.0)
    assert torch.equal(replayed(tape, derived), expected @ expected.t() + expected[:, 1])
    assert torch.equal(replayed(tape, base), torch.zeros(3, 4))
    assert torch.equal(replayed(tape, column), torch.zeros(3))


def test_draws_do_not_depend_on_what_else_is_computed() -> None:
    tape = Tape()
    with torch.device("meta"), tape:
        first, second = torch.randn(50), torch.empty(50).uniform_(2.0, 3.0)
        both = first + second
    before = torch.random.get_rng_state()
    once = replayed(tape, second)
    assert torch.equal(replayed(tape, both), replayed(tape, first) + once)
    assert 2.0 <= once.min() < once.max() <= 3.0
    assert torch.equal(torch.random.get_rng_state(), before), "the generator of others is left as it was"


def test_forms_that_kernels_return_differently() -> None:
    """What the meta device says about strides need not be what a real kernel returns."""
    tape = Tape()
    with torch.device("meta"), tape:
        matrix = torch.eye(4)[:, :3].mul(3.0)
        q, r = torch.linalg.qr(matrix)
        joined = torch.cat([q @ r, q.t().contiguous().t()])
    expected = torch.eye(4)[:, :3] * 3.0
    q, r = torch.linalg.qr(expected)
    assert torch.allclose(replayed(tape, joined), torch.cat([q @ r, q]))


def test_real_tensors_count_as_they_were() -> None:
    numbers = torch.tensor([1.0, 2.0])
    tape = Tape()
    with torch.device("meta"), tape:
        copied = torch.empty(2).copy_(numbers)
    numbers.zero_()
    assert replayed(tape, copied).tolist() == [1.0, 2.0]


def test_a_look_at_a_value_is_answered() -> None:
    tape = Tape()
    with torch.device("meta"), tape:
        assert [rate.item() for rate in torch.linspace(0, 1, 3)] == [0.0, 0.5, 1.0]
        assert bool((torch.ones(2) * 2).eq(2).all())
        with pytest.raises(UserError, match="drawn at random"):
            torch.randn(1).item()


def test_memory_that_nothing_wrote_to_is_not_defined() -> None:
    tape = Tape()
    with torch.device("meta"), tape:
        empty, like, filled = torch.empty(3), torch.empty_like(torch.zeros(3)), torch.empty(3).zero_()
    assert [tape.is_defined(Window.of(tensor)) for tensor in (empty, like, filled)] == [False, False, True]
    assert not tape.is_defined(Window.of(torch.ones(3, device="meta"))), "made outside"


def test_generators_of_the_user_are_found() -> None:
    tape = Tape()
    with torch.device("meta"), tape:
        drawn = torch.empty(3).normal_(generator=torch.Generator("cpu"))
        derived, other = drawn * 2, torch.randn(3)
    found = [tape.has_generator(Window.of(tensor).storage) for tensor in (drawn, derived, other)]
    assert found == [True, True, False]


def test_tensors_with_values_keep_them() -> None:
    kept, other = torch.ones(3), torch.ones(3)
    tape = Tape(kept=[kept])
    with torch.device("meta"), tape:
        assert kept.zero_() is kept
        kept.view(3)[1:].fill_(7.0)
        other.zero_()
    assert (kept.tolist(), other.tolist()) == ([1.0] * 3, [0.0] * 3)


def test_descriptions_have_all_but_the_values() -> None:
    def described(number: float) -> list[str]:
        tape = Tape()
        with torch.device("meta"), tape:
            torch.empty(2).fill_(number).copy_(torch.rand(2, device="cpu"))
        return list(tape.describe())

    assert described(1.0) == described(1.0) != described(2.0)
    assert any("fill_" in line and "1.0" in line for line in described(1.0))
