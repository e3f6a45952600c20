"""The process of replica 0, beside its worker: the server, its memory and its connections."""

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.collectives import Ledger
from echelon.launching import PeerLost
from echelon.parallel.data.buckets import Bucket, fill_buckets, gradient_dtype, weight_dtype
from echelon.state.checkpoint.saved import SavedParameter, SavedState
from echelon.state.ownership import LocalParameter, OwnedSlice, own_state, whole_slice
from echelon.update.async_training.port import (
    Kind,
    Message,
    channel,
    pack_log,
    recv_message,
    recv_tensors,
    send_message,
    send_tensors,
)
from echelon.update.async_training.server import Gradient, Server, ServerFailed
from echelon.update.optim.learning_rate import LearningRate
from echelon.update.optim.local import Make, make_whole
from echelon.update.precision.stepper import DirectStepper, MasterStepper
from echelon.update.update import InWhole

_PATIENCE_SECONDS = 10.0  # with workers that are silent while this process ends

flat_buckets = partial(fill_buckets, limit=sys.maxsize)  # one for each type of numbers


@final
class Host:
    """Weights of their own, since the worker's must stay as it pulled them while others push."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        make: Make,
        stepper: type[DirectStepper] | type[MasterStepper],
        *,
        workers: int,
        staleness: float,
        clip: float | None,
        schedule: Callable[[int], float] | None,
        skips_overflows: bool = False,
    ) -> None:
        self._parameters = [p for _, p in named]
        self._weights = flat_buckets(self._parameters, dtype_of=weight_dtype)
        local = _copy_into(self._weights, named)
        self._stepper = stepper(make_whole(make, self._parameters), local)
        self.optimizer = self._stepper.optimizer
        self.server = Server(
            self._weights,
            local,
            self._stepper,
            LearningRate(self.optimizer, schedule),
            workers=workers,
            staleness=staleness,
            clip=clip,
            skips_overflows=skips_overflows,
        )
        self._connections: list[Connection] = []

    def connect(self, group: dist.ProcessGroup) -> None:
        """Begin to serve the workers of other processes."""
        for worker in range(1, group.size()):
            inbox = flat_buckets(self._parameters)
            self._connections.append(Connection(self.server, group, worker, self._weights, inbox))
        for connection in self._connections:
            connection.start()
        atexit.register(_serve_on, weakref.ref(self.server))

    def owned(self) -> list[OwnedSlice]:
        """Weights and optimizer state, of which there is no second copy that counts."""
        owned = []
        for local, state in self.server.state():
            whole = whole_slice(local.name, local.parameter)
            owned.append(OwnedSlice(whole, local.tensor.detach()))
            for part, value in state.items():
                owned += own_state(part, value, [whole])
        return owned

    def load(self, saved: SavedState, in_whole: InWhole, *, state: bool) -> None:
        """Take weights, masters and the optimizer's state from a checkpoint."""

        def load(local: LocalParameter) -> None:
            whole = whole_slice(local.name, local.parameter)
            of_local = SavedParameter(
                saved, local.name, lambda like: in_whole(OwnedSlice(whole, like)), state=state
            )
            value = local.tensor.detach()
            of_local.fill(saved.value_part(local.name, value.dtype), value)
            self._stepper.load(local, of_local)

        self.server.load(load)

    def updated_tensors(self) -> list[tuple[str, nn.Parameter]]:
        return self._stepper.updated_tensors()

    def storages(self) -> dict[str, list[Tensor]]:
        """The memory beside the worker's, by category."""
        outboxes = [tensor for connection in self._connections for tensor in connection.outbox]
        inboxes = [bucket.buffer for connection in self._connections for bucket in connection.inbox]
        return {
            "parameters": [*(bucket.buffer for bucket in self._weights), *outboxes],
            "gradients": inboxes,
            "optimizer": [tensor for _, state in self.server.state() for tensor in state.values()],
        }

    def close(self) -> None:
        """Serve until every worker has said goodbye, or has been silent for long."""
        end = time.monotonic() + _PATIENCE_SECONDS
        for connection in self._connections:
            connection.thread.join(max(0.0, end - time.monotonic()))


def _copy_into(weights: list[Bucket], named: Sequence[tuple[str, nn.Parameter]]) -> list[LocalParameter]:
    """Copies of the parameters in the memory of `weights`, as something an optimizer can update."""
    views: dict[nn.Parameter, Tensor] = {}
    for bucket in weights:
        views |= bucket.views
    with torch.no_grad():
        for _, parameter in named:
            views[parameter].copy_(parameter)
    local = [LocalParameter(name, p, nn.Parameter(views[p])) for name, p in named]
    for each in local:
        each.tensor.grad_dtype = gradient_dtype(each.parameter)
    return local


def _serve_on(reference: weakref.ref[Server]) -> None:
    """A server outlives its workers; its threads keep it alive as long as there are any. A thread that waits
    in Gloo also aborts the process if its peer goes away while the interpreter ends."""
    server = reference()
    if server is not None and getattr(sys, "last_value", None) is None:  # else no worker is served
        server.linger(_PATIENCE_SECONDS)


# The server's side of one remote worker: a thread that answers its requests, one after the other.


@final
class Connection:
    """Serves `worker` until it says goodbye or is lost; has memory of its own for weights and gradients."""

    def __init__(
        self,
        server: Server,
        group: dist.ProcessGroup,
        worker: int,
        weights: Sequence[Bucket],
        gradients: list[Bucket],
    ) -> None:
        self._server, self._worker = server, worker
        self._ledger = Ledger()
        self._group = channel(group, self._ledger)
        self.outbox = [torch.empty_like(bucket.buffer, device="cpu") for bucket in weights]
        self.inbox = gradients
        self._used = torch.empty(sum(len(bucket.views) for bucket in gradients), dtype=torch.uint8)

    def start(self) -> None:
        # A daemon: a rank that fails must not wait for its workers. A clean end is the host's to see to.
        name = f"echelon-worker-{self._worker}"
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    @torch.no_grad()
    def _serve(self) -> None:
        try:
            with self._server.queue.alone():
                while self._answer(recv_message(self._group, self._worker)):
                    self._server.count(self._ledger)
        except PeerLost as lost:
            # Either it died, and others must not wait for it, or all is over and no worker will ask again.
            self._server.fail(PeerLost(f"worker {self._worker} left the server without a goodbye: {lost}"))
        except BaseException as error:
            self._server.fail(error)
            raise  # printed by the thread: the workers only have the message
        finally:
            self._server.leave(self._worker)

    def _answer(self, request: Message) -> bool:
        """Do what is asked; returns whether there will be more."""
        if request.kind == Kind.GOODBYE:
            return False
        if request.kind == Kind.PUSH:
            buffers = [self._used, *(bucket.buffer for bucket in self.inbox)]
            recv_tensors(self._group, buffers, self._worker, "gradients")
        try:
            reply, tensors, subject = self._ask_server(request)
        except (ServerFailed, PeerLost) as error:
            self._report(error)
            return False
        except BaseException as error:
            self._report(ServerFailed(f"{type(error).__name__}: {error}"))
            raise
        send_message(self._group, reply, self._worker)
        send_tensors(self._group, tensors, self._worker, subject)
        return True

    def _ask_server(self, request: Message) -> tuple[Message, list[Tensor], str]:
        match request.kind:
            case Kind.PULL:
                version = self._server.pull(self._worker, request.number, self.outbox)
                return Message(Kind.DONE, version), self.outbox, "parameters"
            case Kind.PUSH:
                gradient = Gradient(self.inbox, self._used, *request[2:])
                result = self._server.push(self._worker, request.number, gradient)
                return Message(Kind.DONE, *result), [], ""
            case Kind.SYNCHRONIZE:
                version = self._server.synchronize(self._worker, self.outbox)
                return Message(Kind.DONE, version), self.outbox, "parameters"
            case _:
                assert request.kind == Kind.LOG, request
                rows = pack_log(self._server.log(request.number))
                return Message(Kind.DONE, len(rows)), [rows], "log"

    def _report(self, error: Exception) -> None:
        text = torch.frombuffer(bytearray(str(error).encode()), dtype=torch.uint8)
        kind = Kind.LOST if isinstance(error, PeerLost) else Kind.FAILED
        send_message(self._group, Message(kind, len(text)), self._worker)
        send_tensors(self._group, [text], self._worker, "requests")
