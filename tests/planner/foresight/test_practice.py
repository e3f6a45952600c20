"""Programs differ in what is fused and hidden."""

from echelon.planner.foresight import practice
from echelon.planner.foresight.practice import MEGATRON, MEGATRON_2021, Practice


def test_shares_are_shares_and_names_differ() -> None:
    known = [each for each in vars(practice).values() if isinstance(each, Practice)]
    assert len({each.name for each in known}) == len(known) > 5
    for each in known:
        for name, value in vars(each).items():
            if name.startswith("hide_") or name in ("frees", "remakes", "gather_share", "attention"):
                assert 0 <= value <= 1, (each.name, name)


def test_programs_of_2021_wrote_their_scores() -> None:
    assert not MEGATRON_2021.flash
    assert MEGATRON.flash
    assert hash(MEGATRON) != hash(MEGATRON_2021)
