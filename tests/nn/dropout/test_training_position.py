"""Scopes: what is open, for whom, and how it comes back."""

import threading

import pytest
import torch

from echelon.nn.dropout.training_position import TrainingPosition, current, next_use, restore, scope
from echelon.nn.hashing import hash_of, signed


def test_nothing_is_open_outside() -> None:
    assert current() is None
    assert next_use(1) is None


def test_a_scope_says_where_we_are_and_ends() -> None:
    with scope(seed=1, step=2, first_sample=3):
        assert current() == TrainingPosition(1, 2, 3)
        with scope(seed=4, step=5, first_sample=6):
            assert current() == TrainingPosition(4, 5, 6)
        assert current() == TrainingPosition(1, 2, 3)
    assert current() is None


def test_a_scope_ends_with_an_error_too() -> None:
    with pytest.raises(KeyError), scope(seed=1, step=2, first_sample=3):
        raise KeyError
    assert current() is None


def test_uses_are_counted_by_layer_and_start_again_in_every_scope() -> None:
    for _ in range(2):
        with scope(seed=0, step=0, first_sample=0):
            assert [next_use(layer)[1] for layer in (7, 7, 8, 7)] == [0, 1, 0, 2]  # type: ignore[index]


def test_what_was_captured_is_not_moved_by_what_follows() -> None:
    with scope(seed=0, step=0, first_sample=0):
        next_use(7)
        captured = current()
        next_use(7)
    for _ in range(2):
        with restore(captured):
            assert next_use(7) == (captured, 1)


def test_a_scope_can_be_closed_for_a_while() -> None:
    with scope(seed=0, step=0, first_sample=0):
        with restore(None):
            assert current() is None
        assert current() is not None


@pytest.mark.parametrize("seed", [0, -3, 2**70])
def test_keys_are_the_same_where_the_step_is_on_the_device(seed: int) -> None:
    step = torch.tensor(5)
    on_host, on_device = (TrainingPosition(seed, each, 0) for each in (5, step))
    assert on_host.key(7, 2) == hash_of(seed, 5, 7, 2)
    key = on_device.key(7, 2)
    assert isinstance(key, torch.Tensor)
    assert key.item() == signed(hash_of(seed, 5, 7, 2))
    assert step.item() == 5


def test_threads_have_their_own() -> None:
    seen: dict[int, TrainingPosition | None] = {}
    inside = threading.Barrier(2)

    def work(number: int) -> None:
        with scope(seed=number, step=0, first_sample=0):
            inside.wait(10)
            seen[number] = current()

    with scope(seed=9, step=0, first_sample=0):
        threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == {1: TrainingPosition(1, 0, 0), 2: TrainingPosition(2, 0, 0)}
