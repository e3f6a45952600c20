"""The server's side of one remote worker: a thread that answers its requests, one after the other."""

import threading
from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.collectives import Ledger
from echelon.launching import PeerLost
from echelon.parallel.data.buckets import Bucket
from echelon.update.async_training.messages import (
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
        self._outbox = [torch.empty_like(bucket.buffer, device="cpu") for bucket in weights]
        self._inbox = gradients
        self._used = torch.empty(sum(len(bucket.views) for bucket in gradients), dtype=torch.uint8)

    def start(self) -> None:
        # A daemon: a rank that fails must not wait for its workers. A clean end is the host's to see to.
        name = f"echelon-worker-{self._worker}"
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def join(self, patience: float) -> None:
        """Return when the worker has said goodbye, or after `patience` seconds."""
        self._thread.join(patience)

    def storages(self) -> tuple[list[Tensor], list[Tensor]]:
        """The memory of weights and of gradients."""
        return self._outbox, [bucket.buffer for bucket in self._inbox]

    @torch.no_grad()
    def _serve(self) -> None:
        try:
            with self._server.queue.alone():
                while self._answer(recv_message(self._group, self._worker)):
                    self._server.count(self._ledger)
        except PeerLost as lost:
            # Either it died, and others must not wait for it, or all is over and nobody will ask again.
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
            self._receive_gradient()
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
                version = self._server.pull(self._worker, request.number, self._outbox)
                return Message(Kind.DONE, version), self._outbox, "parameters"
            case Kind.PUSH:
                gradient = Gradient(self._inbox, self._used, *request[2:])
                result = self._server.push(self._worker, request.number, gradient)
                return Message(Kind.DONE, *result), [], ""
            case Kind.SYNCHRONIZE:
                version = self._server.synchronize(self._worker, self._outbox)
                return Message(Kind.DONE, version), self._outbox, "parameters"
            case _:
                assert request.kind == Kind.LOG, request
                rows = pack_log(self._server.log(request.number))
                return Message(Kind.DONE, len(rows)), [rows], "log"

    def _receive_gradient(self) -> None:
        buffers = [self._used, *(bucket.buffer for bucket in self._inbox)]
        recv_tensors(self._group, buffers, self._worker, "gradients")

    def _report(self, error: Exception) -> None:
        text = torch.frombuffer(bytearray(str(error).encode()), dtype=torch.uint8)
        kind = Kind.LOST if isinstance(error, PeerLost) else Kind.FAILED
        send_message(self._group, Message(kind, len(text)), self._worker)
        send_tensors(self._group, [text], self._worker, "requests")
