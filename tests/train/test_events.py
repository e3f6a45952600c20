"""What an event says of experts."""

from echelon.train.events import GateLoad


def test_the_load_of_the_busiest_expert_is_a_multiple_of_the_fair_share() -> None:
    assert GateLoad("gate", (6.0, 1.0, 1.0), 0.0, 0.5).largest_share == 2.25
    assert GateLoad("gate", (2.0, 2.0), 0.0, 0.5).largest_share == 1.0
    assert GateLoad("gate", (0.0, 0.0), 0.0, 0.5).largest_share == 1.0, "a step without a token"
