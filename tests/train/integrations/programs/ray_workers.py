"""Two local workers of Ray Train under a plan: prints the losses of both, and those of one device."""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import RunConfig, ScalingConfig, report
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

import echelon

STEPS = 5


def train(plan: str) -> list[float]:
    """What each worker does: Ray has made the process group, and `parallelize` joins it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    inputs = torch.randn(8, 6, dtype=torch.float64)
    with echelon.parallelize(
        model,
        f"{plan} precision=fp64",
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        loss=nn.functional.cross_entropy,
    ) as engine:
        batch = engine.local((inputs, inputs[:, :4].argmax(dim=1)))
        return [engine.step(batch).loss for _ in range(STEPS)]


def worker(config: dict[str, Any]) -> None:
    losses = train(config["plan"])
    (Path(config["folder"]) / f"{os.environ['RANK']}.json").write_text(json.dumps(losses))
    report({"loss": losses[-1]})


def main(plan: str) -> dict[str, Any]:
    sockets = tempfile.mkdtemp(prefix="ray-")  # whose paths must be short
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=sockets,
        log_to_driver=False,
    )
    folder = os.environ["FOLDER"]
    trainer = TorchTrainer(
        worker,
        train_loop_config={"plan": plan, "folder": folder},
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=folder, name="run"),
    )
    trainer.fit()
    ray.shutdown()
    shutil.rmtree(sockets, ignore_errors=True)
    of_workers = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]
    return {"workers": of_workers, "one device": train("data=1")}


if __name__ == "__main__":
    print("\n" + json.dumps(main(sys.argv[1])))
