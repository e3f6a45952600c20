"""A worker's gradients: they add up until the push, and say which parameters were used."""

import pytest
import torch
from torch import nn

from echelon.collectives import RecordingGroup
from echelon.update.async_training import WorkerGradients
from tests.cases import stop
from tests.sets import set_of

pytestmark = pytest.mark.usefixtures("packed")


def make_worker() -> tuple[WorkerGradients, nn.ParameterList]:
    model = nn.ParameterList([torch.full((2,), float(number)) for number in range(3)])
    model[1].requires_grad_(False)
    return WorkerGradients(set_of(model, RecordingGroup("data", 1, 2))), model


def run(worker: WorkerGradients, *losses: torch.Tensor) -> None:
    worker.start_step()
    for loss in losses:
        worker.start_backward(last=True)
        loss.backward()
        worker.finish_backward()
    worker.reduce()


def test_gradients_of_microbatches_add_up_where_they_are_pushed_from() -> None:
    worker, model = make_worker()
    for _ in range(2):  # steps
        run(worker, (3 * model[0]).sum(), (4 * model[0] + model[2]).sum())
        assert [bucket.buffer.tolist() for bucket in worker.buckets] == [[7.0, 7.0, 1.0, 1.0]]
        assert worker.used_flags().tolist() == [1, 1]


def test_what_was_not_used_is_zeros_and_flagged_so_for_each_step() -> None:
    worker, model = make_worker()
    run(worker, model[2].sum())
    assert worker.used_flags().tolist() == [0, 1], "trained parameters, in the order of the model"
    assert worker.buckets[0].buffer.tolist() == [0.0, 0.0, 1.0, 1.0]
    run(worker, model[0].sum() + stop(model[2]).sum())
    assert worker.used_flags().tolist() == [1, 0], "a function without a gradient does not count"
    assert worker.buckets[0].buffer.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_a_pull_into_the_weights_is_seen_by_the_model() -> None:
    worker, model = make_worker()
    assert [buffer.tolist() for buffer in worker.weights] == [[0.0, 0.0, 2.0, 2.0]]
    worker.weights[0].fill_(9.0)
    assert [parameter.tolist() for parameter in model] == [[9.0, 9.0], [1.0, 1.0], [9.0, 9.0]]


def test_a_worker_updates_and_owns_nothing_and_its_norm_is_the_server_s() -> None:
    worker, model = make_worker()
    run(worker, model[0].sum())
    assert worker.local_parameters() == worker.norm_share() == worker.owned() == []
    storages = worker.storages()
    assert len(storages.parameters) == 3
    assert [tensor is worker.buckets[0].buffer for tensor in storages.gradients] == [True]


def test_matrices_may_add_in_place_during_a_backward_pass_and_not_between() -> None:
    worker, _ = make_worker()
    assert worker.accumulation is not None
    states = [worker.accumulation.is_open]
    worker.start_backward(last=True)
    states.append(worker.accumulation.is_open)
    worker.finish_backward()
    states.append(worker.accumulation.is_open)
    assert states == [False, True, False]


def test_after_the_close_gradients_are_the_model_s_own() -> None:
    worker, model = make_worker()
    worker.start_step()
    worker.close()
    model[0].sum().backward()
    assert worker.used_flags().tolist() == [0, 0]
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model)
