"""By the times of host and device: which steps are recorded, and which replays are kept."""

from echelon.engine.step.graphs.step_times import StepTimes
from tests.engine.step.graphs.fake_recorder import FakeTiming


def times(host: float, device: float | None, step: float, replay: float = 0.0) -> StepTimes:
    """In seconds, after two first steps that took longer."""
    passes = [FakeTiming(9.0, 9.0)] * 2 + [FakeTiming(host, device)] * 2
    return StepTimes(list(passes), [9.0, 9.0, step, step], [FakeTiming(0.001, replay)])


def test_a_step_is_bound_by_the_host_if_it_asks_for_its_work_no_faster() -> None:
    assert times(0.09, 0.1, 0.1).is_host_bound() is True
    assert times(0.03, 0.1, 0.09).is_host_bound() is True, "with its update"
    assert times(0.03, 0.1, 0.05).is_host_bound() is False
    assert times(0.09, None, 0.1).is_host_bound() is None
    assert times(0.4, 0.4, 0.5).is_host_bound() is False, "work of that length is not asked for by hand"


def test_a_replay_is_kept_if_it_makes_a_step_shorter() -> None:
    assert times(0.08, 0.1, 0.15, replay=0.1).is_faster(), "the host was the slower one"
    assert not times(0.01, 0.1, 0.15, replay=0.1).is_faster(), "and would be"
    assert not times(0.08, 0.1, 0.1, replay=0.095).is_faster()
    assert times(0.08, 0.1, 0.1, replay=0.08).is_faster()
    assert not times(0.08, None, 0.1, replay=0.01).is_faster()


def test_of_a_loop_that_calls_passes_the_rest_is_not_known() -> None:
    passes = StepTimes([FakeTiming(0.1, 0.1)] * 2, [], [FakeTiming(0.001, 0.05)])
    assert passes.is_host_bound()
    assert passes.is_faster()
