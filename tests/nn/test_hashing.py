"""Hashes of integers, tensors and texts are the same everywhere."""

import torch

from echelon.nn.hashing import hash_of, hash_on_device, hash_text, mix, mix_, signed, signed_key


def test_whole_numbers_and_tensors_are_mixed_alike() -> None:
    numbers = [hash_of(index) for index in range(50)]
    mixed = mix_(torch.tensor([signed(number) for number in numbers]))
    assert mixed.tolist() == [signed(mix(number)) for number in numbers]


def test_the_order_of_numbers_matters_and_a_hash_goes_on() -> None:
    assert hash_of(1, 2, 3) == hash_of(3, start=hash_of(1, 2))
    assert hash_of(1, 2) != hash_of(2, 1)
    assert hash_of(-1, 2**70) < 2**64


def test_a_hash_goes_on_where_its_start_is_on_a_device() -> None:
    for numbers in ((0,), (3, 2**64 - 1), (hash_of(7), 0, 5)):
        for start in (0, 12, hash_of(1)):
            found = hash_on_device(*numbers, start=torch.tensor(signed(start)))
            assert found.item() == signed(hash_of(*numbers, start=start))
            assert signed_key(found) is found
            assert signed_key(hash_of(*numbers, start=start)) == found.item()


def test_a_text_has_the_same_hash_in_every_process() -> None:
    """Ranks and resumed trainings draw the same masks by it: Python's own hash differs between processes."""
    assert hash_text("blocks.0.dropout") == 0x6F85E017111F35AA
    assert hash_text("") != hash_text("0")


def test_signed_numbers_have_the_same_bits() -> None:
    assert [signed(number) for number in (0, 2**63 - 1, 2**63, 2**64 - 1)] == [0, 2**63 - 1, -(2**63), -1]
