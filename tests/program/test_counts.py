"""What a rank keeps, from the order of its own list."""

from echelon.program import counts
from tests.program.cases import program_of


def test_activations_live_from_the_forward_to_the_last_part_of_the_backward() -> None:
    assert counts.in_flight(program_of("rank 0: F0 B0 F1 F2 B1 B2")) == (2,)
    assert counts.in_flight(program_of("rank 0: F0 I0 F1 I1 W0 W1")) == (2,)
    assert counts.in_flight(program_of("rank 0: F0 I0 W0 F1 I1 W1\nrank 1:")) == (1, 0)


def test_versions_are_the_newest_and_those_stashed() -> None:
    assert counts.versions(program_of("rank 0: F0 B0 UPDATE")) == (1,)
    assert counts.versions(program_of("rank 0: STASH0 UPDATE STASH1 UPDATE POP0 STASH2 UPDATE")) == (3,)
