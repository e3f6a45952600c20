"""A call that is prepared now and made later, by another thread."""

import torch
from torch import nn

from echelon.update.offload.host_optimizer import HostCall


def test_hooks_and_options_that_are_set_meanwhile_are_for_the_next_update() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    call = HostCall(optimizer, [weight])
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    optimizer.param_groups[0]["lr"] = 100.0
    weight.grad = torch.full((3,), 2.0)
    call(0.25)
    assert weight.tolist() == [0.75, 0.75, 0.75]
    assert called == []
    optimizer.step()
    assert called == ["before", "after"]
