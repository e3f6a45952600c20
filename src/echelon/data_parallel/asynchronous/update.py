"""The asynchronous way to new weights: pull, compute, push, and wait for nobody who is not too far behind.

    staleness 0      one update a round, of the mean over all workers: equal to bulk-synchronous training
    staleness S ≥ 1  every push is one update; a worker is at most S steps ahead of the slowest
    staleness inf    every push is one update; nobody ever waits

Numbers of a step (loss, norm, tokens) are those of the update it went into: with staleness 0 of the global
batch, else of this worker's own. Whatever ranks do together between steps calls `settle` first.
"""

import atexit
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from echelon.collectives import Group
from echelon.data_parallel.adding import Adding, add_in_place, may_miss_sums
from echelon.data_parallel.asynchronous.host import Host, flat_buckets
from echelon.data_parallel.asynchronous.log import Push
from echelon.data_parallel.asynchronous.messages import open_group
from echelon.data_parallel.asynchronous.port import SERVER, LocalPort, Port, RemotePort
from echelon.data_parallel.asynchronous.rates import Rates
from echelon.data_parallel.asynchronous.server import Gradient
from echelon.data_parallel.buckets import Bucket
from echelon.data_parallel.buffers import Buffers, broadcast
from echelon.data_parallel.parameter_server import move_in
from echelon.data_parallel.update import Outcome, Update
from echelon.errors import UserError
from echelon.optim.local import Make, make_local
from echelon.ownership import Owned, whole_slice
from echelon.precision import Direct, Masters


@final
class Asynchronous(Update):
    """Workers along `group`; the process of replica 0 hosts the server beside its worker.

    `groups` are the ranks of this group and of all others along its axis, in the same order on every rank.
    `schedule` maps the version to a factor of the learning rate; `stepper` is how the server updates.
    """

    lockstep = False
    sharded = True  # the server's rank owns everything

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        make: Make,
        *,
        groups: Sequence[Sequence[int]],
        staleness: float,
        clip: float | None = None,
        schedule: Callable[[int], float] | None = None,
        stepper: type[Direct] | type[Masters] = Direct,
    ) -> None:
        self._module, self._group = module, group
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._parameters = [p for _, p in named]
        self._weights, self._gradients = flat_buckets(self._parameters), flat_buckets(self._parameters)
        for bucket in self._weights:
            move_in(bucket)
        self._used: set[nn.Parameter] = set()
        self._adding = Adding()
        for parameter in self._parameters:
            # Not of `self`: a parameter may outlive this.
            arrived = may_miss_sums(partial(_arrived, self._used, self._gradients))
            parameter.register_post_accumulate_grad_hook(arrived)
        self._share_frozen()
        self._buffers = Buffers(module, group)
        self._host: Host | None = None
        if group.rank == SERVER:
            self._host = Host(
                named,
                make,
                stepper,
                workers=group.size,
                staleness=staleness,
                clip=clip,
                schedule=schedule,
            )
            self.optimizer = self._host.optimizer
        else:
            self.optimizer = make_local(make, self._parameters, {}, in_parts=False)
        self._rates = Rates(self.optimizer, schedule)
        self._step = 0
        self._port = self._open_port(groups)
        # When nobody has this any more, or the process ends, the server must not wait for this worker.
        weakref.finalize(self, self._port.leave).atexit = False
        # At the end the last to register is the first to be called: while the process group is still there.
        atexit.register(_leave_at_exit, weakref.ref(self._port))

    def start_step(self) -> float:
        self._port.pull(self._step, self._memory())
        self._used.clear()
        for bucket in self._gradients:
            bucket.open()
        return 1.0

    # A worker's backward passes only add up: nothing is sent before its push.

    def start_backward(self, *, last: bool) -> None:  # noqa: ARG002
        self._adding.open = True

    def finish_backward(self) -> None:
        self._adding.open = False

    def add_in_place(self) -> None:
        add_in_place(self._module, self._adding)

    def gather(self, *, backward: bool) -> None:
        pass

    def free(self) -> None:
        pass

    def finish_step(self, tally: Tensor) -> Outcome:
        total, count = tally.tolist()
        used = torch.tensor([p in self._used for p in self._parameters], dtype=torch.uint8)
        for bucket in self._gradients:
            bucket.close()
        landed = self._port.push(self._step, Gradient(self._gradients, used, total, count))
        self._step += 1
        _check_counted(landed.counted)
        if self._host is None:  # the server sets its own; here it is for those who look
            self._rates.set(landed.version - 1)
        return Outcome(landed.total, landed.counted, landed.norm)

    def settle(self) -> None:
        """Wait until every worker is here and bring the newest weights, and replica 0's buffers, to all."""
        self._settle()

    def log(self) -> list[Push]:
        """All that led to the weights as they are, the same on every rank; all must call this."""
        return self._port.log(self._settle())

    def agree(self, tally: Tensor) -> tuple[float, float]:
        with self._group.ledger.about("metrics"):
            self._group.all_reduce(tally)
        total, count = tally.tolist()
        _check_counted(count)
        return total, count

    def owned(self) -> list[Owned]:
        if self._host is None:
            return []
        frozen = [(name, p) for name, p in self._module.named_parameters() if not p.requires_grad]
        return self._host.owned() + [Owned(whole_slice(name, p, replicated=()), p) for name, p in frozen]

    def storages(self) -> dict[str, list[Tensor]]:
        storages = {
            "parameters": list[Tensor](self._module.parameters()),
            "gradients": [bucket.buffer for bucket in self._gradients],
            "optimizer": [],
        }
        if self._host is not None:
            served = self._host.storages()
            storages["parameters"] += served.parameters
            storages["gradients"] += served.gradients
            storages["optimizer"] += self._host.optimizer_storages()
        return storages

    def _open_port(self, groups: Sequence[Sequence[int]]) -> Port:
        messages = open_group(groups) if self._group.size > 1 else None
        if self._host is None:
            assert messages is not None, "who is alone is the server"
            return RemotePort(messages, self._group.ledger)
        if messages is not None:
            self._host.connect(messages)
        return LocalPort(self._host.server, self._group.ledger)

    def _share_frozen(self) -> None:
        with self._group.ledger.about("parameters"):
            for parameter in self._module.parameters():
                if not parameter.requires_grad:
                    broadcast(parameter, self._group)

    def _settle(self) -> int:
        version = self._port.settle(self._memory())
        self._buffers.share()
        return version

    def _memory(self) -> list[Tensor]:
        return [bucket.buffer for bucket in self._weights]


def _arrived(used: set[nn.Parameter], gradients: list[Bucket], parameter: nn.Parameter) -> None:
    if parameter.grad is None:
        return  # torch also tells when a function has no gradient for it
    used.add(parameter)
    for bucket in gradients:
        if parameter in bucket.views:
            bucket.land(parameter)


def _leave_at_exit(reference: weakref.ref[Port]) -> None:
    port = reference()
    if port is not None:
        port.leave()


def _check_counted(count: float) -> None:
    if count == 0:
        raise UserError(
            "a step had no sample that the loss counts; give every worker at least one (with staleness=0, "
            "one worker)"
        )
