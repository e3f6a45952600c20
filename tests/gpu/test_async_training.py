"""The server on a GPU works beside what its rank's own stream holds."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

from echelon.update.async_training.host import Host, flat_buckets
from echelon.update.async_training.server import Gradient
from echelon.update.precision.stepper import DirectStepper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_LONG = 2_000_000_000  # clock cycles: about a second
_SIZE = 1024


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def make_host(weight: nn.Parameter) -> Host:
    return Host(
        [("weight", weight)], sgd, DirectStepper, workers=2, staleness=float("inf"), clip=None, schedule=None
    )


def zeros() -> nn.Parameter:
    return nn.Parameter(torch.zeros(_SIZE, device="cuda"))


def test_a_worker_is_served_while_the_stream_of_the_server_s_rank_waits() -> None:
    server, copy = make_host(zeros()).server, torch.ones(_SIZE)
    torch.cuda.synchronize()

    def pull() -> None:
        with server.queue.alone():
            server.pull(1, 0, [copy])

    torch.cuda._sleep(_LONG)
    thread = threading.Thread(target=pull)
    thread.start()
    thread.join()
    assert not torch.cuda.current_stream().query(), "the pull waited for this thread's stream"
    assert copy.tolist() == [0.0] * _SIZE


def test_what_a_rank_has_queued_before_its_push_is_in_the_weights_that_it_pulls() -> None:
    weight = zeros()
    server = make_host(weight).server
    buckets = flat_buckets([weight])
    into = torch.empty(_SIZE, device="cuda")
    server.pull(0, 0, [into])
    torch.cuda._sleep(_LONG)
    buckets[0].buffer.fill_(3.0)
    server.push(0, 0, Gradient(buckets, torch.ones(1, dtype=torch.uint8), 0.0, 1.0))
    server.pull(0, 1, [into])
    assert into.tolist() == [-3.0] * _SIZE
