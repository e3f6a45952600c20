"""The bench `start`: the memory of ranks that start with a model that none of them could hold whole.

A Llama of 0.7 billion parameters on four ranks, from its initial values and from a Hugging Face folder; where
two ranks hold all of it, of 0.4 billion, so that a machine of 24 GB has the memory for all four. The limits:
of the weights that a rank owns a quarter more, and two units; in steps the same of weights, gradients and
AdamW's state, and the activations.
"""

import dataclasses
import hashlib
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.compare import Row, Spread
from benchmarks.harness import measuring_ranks
from echelon.engine import parallelize
from echelon.launching import TRAINING_MODULES, preload
from echelon.models import ModelConfig, build, cross_entropy
from echelon.nn.initialization.initial_values import deferred
from echelon.state.ownership import VALUE

PLANS = {"data=4 zero=3": 20, "data=4 zero=3 shard=2": 10, "tensor=2 pipeline=2 microbatches=2": 20}  # layers
_FULL = ModelConfig("llama", layers=20, width=1536, heads=12, vocab=32000, sequence=128)
_SMALL = ModelConfig("llama", layers=4, width=64, heads=4, vocab=128, sequence=32)
_STEPS, _SAMPLES = 2, 4
_STATE = 4  # weights, gradients, and the two moments of AdamW


def bench(quick: bool) -> tuple[dict[str, Any], list[Row]]:
    """Peak memory of four ranks that start and train a Llama of 0.7 B parameters."""
    preload(*TRAINING_MODULES, __name__)
    rows, settings = [], {}
    with tempfile.TemporaryDirectory() as folder:
        written = str(Path(folder, "written"))
        for plan, layers in PLANS.items():
            config, digests = _SMALL if quick else dataclasses.replace(_FULL, layers=layers), set()
            for source in (None, str(Path(folder, "source"))):
                with measuring_ranks(4) as ranks:
                    measured = ranks.run(measure, config, plan, source, written)
                Path(written).rename(Path(folder, "source") if source is None else Path(folder, "again"))
                digests.add(measured[0]["weights"])
                rows.append(_row(plan, source, measured))
            for name in ("source", "again"):
                shutil.rmtree(Path(folder, name))
            settings[plan] = {
                "parameters": config.num_parameters,
                "model": dataclasses.asdict(config),
                "weights": sorted(digests),  # one: they are the same from both sources
            }
    return {"precision": "fp32", "optimizer": "AdamW", "steps": _STEPS, "plans": settings}, rows


def _row(plan: str, source: str | None, measured: list[dict[str, Any]]) -> Row:
    """Of the rank that is nearest to its limits."""
    seconds = Spread.of([max(rank["seconds"] for rank in measured)])
    figures = (name for name in measured[0] if name.endswith("_bytes"))
    contender = "initial values" if source is None else "Hugging Face folder"
    extras = {name: max(rank[name] for rank in measured) for name in figures}
    return Row(plan, contender, contender, seconds, Spread(1.0, 1.0, 1.0), extras)


def measure(config: ModelConfig, plan: str, source: str | None, written: str) -> dict[str, Any]:
    """Runs in every rank. The weights that it starts with go to the folder `written`."""
    _warm_up()
    torch.manual_seed(0)
    model = deferred(lambda: build(config))
    unit = 4 * max(sum(p.numel() for p in layer.parameters()) for layer in model.layers())
    before = _restart_peak()
    begin = time.perf_counter()
    engine = parallelize(model, plan, optimizer=torch.optim.AdamW, loss=cross_entropy, weights=source)
    seconds = time.perf_counter() - begin
    start_peak = _peak() - before
    owned = sum(each.tensor.nbytes for each in engine.owned() if each.slice.part == VALUE)
    engine.export(written)
    weights = _digest(Path(written)) if engine.mesh.rank == 0 else ""
    _restart_peak()
    tokens = torch.randint(0, config.vocab, (_SAMPLES, 65 if config.sequence > 65 else config.sequence))
    for _ in range(_STEPS):
        engine.step(engine.local((tokens[:, :-1], tokens[:, 1:])))
    step_peak, activations = _peak() - before, engine.memory().peak["activations"]
    engine.close()
    return {
        "seconds": seconds,
        "weights": weights,
        "owned_bytes": owned,
        "start_peak_bytes": start_peak,
        "start_limit_bytes": int(1.25 * owned) + 2 * unit,
        "step_peak_bytes": step_peak,
        "step_limit_bytes": int(1.25 * _STATE * owned) + 2 * unit + activations,
    }


def _warm_up() -> None:
    """What torch imports and allocates on first use does not count."""
    layer = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(2, 8)).sum().backward()
    optimizer.step()


def _digest(folder: Path) -> str:
    """Of the weights in a folder."""
    digest = hashlib.blake2b()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()


def _restart_peak() -> int:
    """Forget the peak of resident memory so far; returns what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
