"""Parameters as views of flat memory: shown, hidden, and never changed in silence."""

import pytest
import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.parallel.data.zero.weight_access import FreedParameter
from echelon.parallel.data.zero.weight_views import ChangedRuns, Placement, WeightViews

SHARDED = Placement(sharded=True, offloaded=False)


def made() -> tuple[list[nn.Parameter], Tensor, WeightViews]:
    parameters = [nn.Parameter(torch.arange(4.0).view(2, 2)), nn.Parameter(torch.tensor([7.0]))]
    flat = torch.zeros(6)
    named = [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]
    return parameters, flat, WeightViews(named, flat, [(0, 4), (5, 6)], SHARDED)


def test_parameters_are_places_in_the_buffer() -> None:
    parameters, flat, _ = made()
    assert flat.tolist() == [0, 1, 2, 3, 0, 7]
    flat[5] = 8
    assert parameters[1].item() == 8


def test_hidden_weights_are_of_another_class_and_version_until_they_are_shown() -> None:
    parameters, flat, views = made()
    version = parameters[0]._version
    views.hide()
    assert all(type(parameter) is FreedParameter for parameter in parameters)
    assert [parameter._version for parameter in parameters] == [version + 1] * 2
    views.show()
    assert [type(parameter) for parameter in parameters] == [nn.Parameter] * 2
    assert (parameters[0]._version, parameters[0].data_ptr()) == (version, flat.data_ptr())
    views.check_unchanged()


@pytest.mark.parametrize("with_memory", [False, True])
def test_a_change_is_refused_once(with_memory: bool) -> None:
    parameters, flat, views = made()
    if with_memory:
        parameters[1].data = torch.ones(1)
    else:
        parameters[1].detach().add_(1)
    with pytest.raises(UserError, match=r"p1: changed in place during .* with zero=3 the change is lost"):
        views.check_unchanged()
    views.check_unchanged()
    assert parameters[1].data_ptr() == flat[5:].data_ptr()


def test_other_memory_between_steps_is_taken_over() -> None:
    parameters, flat, views = made()
    parameters[0].data = torch.full((2, 2), 5.0)
    views.take_over()
    assert flat.tolist() == [5, 5, 5, 5, 0, 7]
    moved = flat.clone()
    views.move_to(moved)
    moved[0] = 1
    assert parameters[0][0, 0] == 1


def test_a_place_names_its_fields_and_the_fix() -> None:
    both = Placement(sharded=True, offloaded=True)
    assert (str(both), both.fix) == ("zero=3 and offload=parameters", "use zero=2 without offload=parameters")
    assert (SHARDED.fix, Placement(False, True).fix) == ("use zero=2", "drop offload=parameters")


@pytest.mark.parametrize("keeps_shards", [False, True])
def test_runs_that_no_version_tells_of_are_compared(keeps_shards: bool) -> None:
    runs = [torch.tensor([1.0, float("nan")]), torch.ones(3)]
    changed = ChangedRuns([run.clone() for run in runs] if keeps_shards else None)
    changed.show(runs)
    changed.compare(runs)
    runs[1][2] = 2
    changed.compare(runs)
    runs[1][2] = 1
    changed.compare(runs)
    assert changed.is_watching
    assert changed.finish() == [False, True]
    assert not changed.is_watching
