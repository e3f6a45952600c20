"""Weights from a training to a server of the same model, in the four phases of vLLM's weight transfer.

    Trainer                     Receiver
    init        ───────────►    opens the connection, once
    start       ───────────►    nothing is served from here on
    update      ───────────►    one tensor, or several, any number of times
    finish      ───────────►    all tensors have come; serves the new weights

Run it: python examples/weight_receiver.py. Names, types and shapes travel as JSON, values as bytes.
"""

import json
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.pool import ThreadPool
from typing import Any

import torch
from torch import Tensor, nn

import echelon

PLAN, RANKS = "data=2 zero=3", 2
INPUTS = torch.linspace(-1, 1, 24).view(8, 3)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))


class Receiver:
    """A server: holds a plain model, and takes new weights for it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._missing: set[str] | None = None  # tensors of the update that is under way

    def start_weight_update(self) -> None:
        self._missing = set(self.model.state_dict())

    @torch.no_grad()
    def update_weights(self, name: str, tensor: Tensor) -> None:
        assert self._missing is not None, "start_weight_update comes first"
        self.model.state_dict()[name].copy_(tensor)
        self._missing.remove(name)

    def finish_weight_update(self) -> None:
        assert not self._missing, f"no values came for {self._missing}"
        self._missing = None

    def serve(self, connection: Connection) -> Tensor:
        """Do what the trainer asks for, until it closes; returns what the model computes then."""
        while (request := json.loads(connection.recv_bytes()))["phase"] != "close":
            if request["phase"] == "update":
                data = bytearray(connection.recv_bytes())
                values = torch.frombuffer(data, dtype=getattr(torch, request["dtype"]))
                self.update_weights(request["name"], values.view(request["shape"]))
            else:
                getattr(self, f"{request['phase']}_weight_update")()
        assert self._missing is None, "an update was not finished"
        output: Tensor = self.model(INPUTS)
        return output.detach()


class Trainer:
    """The other end, on rank 0 of a training; on other ranks nothing is sent."""

    def __init__(self, address: Any, *, sends: bool) -> None:
        self._connection = Client(address) if sends else None  # init

    def start(self) -> None:
        self._send(phase="start")

    def update(self, name: str, tensor: Tensor) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._send(phase="update", name=name, dtype=dtype, shape=list(tensor.shape))
        if self._connection is not None:
            self._connection.send_bytes(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())

    def finish(self) -> None:
        self._send(phase="finish")

    def close(self) -> None:
        self._send(phase="close")

    def _send(self, **request: Any) -> None:
        if self._connection is not None:
            self._connection.send_bytes(json.dumps(request).encode())


def train(address: Any, plan: str = PLAN) -> Tensor:
    """Train, and send the weights after every step; returns what the trained model computes."""
    torch.manual_seed(0)
    targets = INPUTS[:, :2].square()
    with echelon.parallelize(
        build(), plan, optimizer=torch.optim.Adam, loss=nn.functional.mse_loss
    ) as engine:
        trainer = Trainer(address, sends=engine.main)
        for _ in range(3):
            engine.step(engine.local((INPUTS, targets)))
            trainer.start()
            for name, tensor in engine.weights():  # on every rank
                trainer.update(name, tensor)
            trainer.finish()
        trainer.close()
        with engine.whole() as model, torch.no_grad():
            output: Tensor = model(INPUTS)
            return output


def receive(listener: Listener) -> Tensor:
    with listener.accept() as connection:
        return Receiver(build()).serve(connection)


def main(plan: str = PLAN, ranks: int = RANKS) -> bool:
    """Return whether the server computes what the trained model does."""
    with Listener(("localhost", 0)) as listener, ThreadPool(1) as thread:
        served = thread.apply_async(receive, [listener])
        trained = echelon.launch(train, ranks, listener.address, plan)
        return all(torch.equal(served.get(), each) for each in trained)


if __name__ == "__main__":
    print(f"served as trained: {main()}")
