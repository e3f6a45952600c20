"""The interface of strategies, by the one that has nobody to agree with."""

import torch
from torch import nn

from echelon.collectives import RecordingGroup
from echelon.parallel.data.parameter_set import SharedGradient
from echelon.parallel.data.sharing import SingleReplica, local_gradients, own_whole
from echelon.state.ownership import LocalParameter
from tests.sets import set_of


def frozen_and_trained() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).requires_grad_(False))


def test_the_optimizer_updates_the_trained_parameters_themselves() -> None:
    model = frozen_and_trained()
    local = SingleReplica(set_of(model, RecordingGroup("data"))).local_parameters()
    assert [(each.name, each.begin) for each in local] == [("0.weight", 0), ("0.bias", 0)]
    assert all(each.tensor is each.parameter for each in local)


def test_a_step_forgets_the_gradients_of_the_one_before() -> None:
    model = frozen_and_trained()
    sharing = SingleReplica(set_of(model, RecordingGroup("data")))
    for _ in range(2):
        sharing.start_step()
        for _ in range(2):  # microbatches
            sharing.start_backward(last=False)
            model(torch.ones(1, 2)).sum().backward()
            sharing.finish_backward()
        sharing.reduce()
        assert model[0].weight.grad is not None
        expected = 2 * model[1].weight.detach().t().expand(2, 2)
        torch.testing.assert_close(model[0].weight.grad, expected)


def test_matrices_may_add_in_place_during_a_backward_pass_and_not_between() -> None:
    """Between steps the user may take gradients of the same model."""
    sharing = SingleReplica(set_of(nn.Linear(2, 2), RecordingGroup("data")))
    assert sharing.accumulation is not None
    states = [sharing.accumulation.is_open]
    sharing.start_backward(last=True)
    states.append(sharing.accumulation.is_open)
    sharing.finish_backward()
    states.append(sharing.accumulation.is_open)
    assert states == [False, True, False]


def test_each_strategy_has_an_accumulation_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first, second = (SingleReplica(set_of(layer, RecordingGroup("data"))) for layer in model)
    first.start_backward(last=True)
    assert second.accumulation is not None
    assert not second.accumulation.is_open


def test_the_norm_leaves_out_what_others_count_and_what_has_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    elsewhere = SharedGradient(model[0].weight, RecordingGroup("tied"), counts_norm=False)
    sharing = SingleReplica(set_of(model, RecordingGroup("data"), shared_gradients=[elsewhere]))
    for number, parameter in enumerate((model[0].weight, model[0].bias, model[1].weight)):
        parameter.grad = torch.full_like(parameter, number)
    assert [float(gradient.flatten()[0]) for gradient in sharing.norm_share()] == [1.0, 2.0]


def test_local_gradients_are_those_of_what_is_held_and_counted_by_the_whole() -> None:
    """At zero=1 and more, what is held is another tensor than the parameter."""
    parameter, run = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))
    parameter.grad, run.grad = torch.zeros(4), torch.full((2,), 7.0)
    local = [LocalParameter("w", parameter, run, 2)]
    assert [gradient.tolist() for gradient in local_gradients(local)] == [[7.0, 7.0]]
    assert local_gradients(local, {parameter}) == []


def test_frozen_weights_are_owned_and_take_memory_too() -> None:
    model = frozen_and_trained()
    made = set_of(model, RecordingGroup("data"))
    sharing = SingleReplica(made)
    assert [each.slice.name for each in sharing.owned()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert all(each.slice.is_whole for each in own_whole(made))
    model[0].bias.grad = torch.ones(2)
    storages = sharing.storages()
    assert [tensor is p for tensor, p in zip(storages.parameters, model.parameters(), strict=True)] == [
        True
    ] * 4
    assert [tensor is model[0].bias.grad for tensor in storages.gradients] == [True]


def test_reallocate_moves_trained_weights_and_leaves_the_old_memory_to_its_holders() -> None:
    model = frozen_and_trained()
    sharing = SingleReplica(set_of(model, RecordingGroup("data")))
    old = [parameter.data for parameter in model.parameters()]
    sharing.reallocate()
    moved = [p.data_ptr() != before.data_ptr() for p, before in zip(model.parameters(), old, strict=True)]
    assert moved == [True, True, False, False]
    assert all(torch.equal(p, before) for p, before in zip(model.parameters(), old, strict=True))


def test_a_closed_strategy_lets_go_of_gradients() -> None:
    model = frozen_and_trained()
    sharing = SingleReplica(set_of(model, RecordingGroup("data")))
    model[0].weight.grad = torch.ones(2, 2)
    sharing.close()
    assert model[0].weight.grad is None
