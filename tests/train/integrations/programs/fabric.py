"""A loop of Lightning Fabric, plain on one device or under a plan: prints its losses and whole weights."""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon.integrations import FabricStrategy

STEPS = 6


def loop(fabric: Fabric, batch: int, folder: Path, *, resumed: bool = False) -> tuple[list[float], Any]:
    """Train, save in the middle; or go on from there. Each step takes two batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    weights, biases = [p for p in model.parameters() if p.dim() > 1], [model[0].bias, model[2].bias]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    model, optimizer = fabric.setup(model, optimizer)
    inputs = torch.randn(8 * 2 * STEPS, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
    batches = list(fabric.setup_dataloaders(DataLoader(dataset, batch_size=batch)))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0}
    if resumed:
        fabric.load(folder, state)
    losses = []
    for step in range(state["step"], STEPS):
        optimizer.zero_grad()
        for place in range(2):
            x, y = batches[2 * step + place]
            with fabric.no_backward_sync(model, enabled=place == 0):
                loss = nn.functional.cross_entropy(model(x), y) / 2
                fabric.backward(loss)
            losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
        optimizer.step()
        schedule.step()
        if step == 2 and not resumed:
            fabric.save(folder, state | {"step": step + 1})
    full = fabric.strategy.get_module_state_dict(model._forward_module)
    return losses, {name: value.tolist() for name, value in full.items()}


def main(plan: str | None) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)  # Fabric rounds outputs to it
    folder = Path(os.environ["FOLDER"]) / "checkpoint"
    options: dict[str, Any] = {"accelerator": "cpu", "precision": "64-true"}
    if plan is None:
        losses, weights = loop(Fabric(**options), 8, folder.with_suffix(".pt"))
        return {"losses": losses, "weights": weights}
    options["devices"] = int(os.environ["WORLD_SIZE"])
    table = {"tensor_table": {"0": "column", "2": "row"}} if "tensor" in plan else {}
    fabric = Fabric(strategy=FabricStrategy(plan, **table), **options)
    fabric.launch()
    replicas = fabric.strategy.distributed_sampler_kwargs["num_replicas"]
    losses, weights = loop(fabric, 8 // replicas, folder)
    fabric.strategy.close()
    again = Fabric(strategy=FabricStrategy("data=2 precision=fp64"), **options)
    again.launch()
    resumed, _ = loop(again, 4, folder, resumed=True)
    again.strategy.close()
    return {"losses": losses, "weights": weights, "resumed": resumed}


if __name__ == "__main__":
    result = main(*sys.argv[1:2] or [None])
    if os.environ.get("RANK", "0") == "0":
        print("\n" + json.dumps(result))
