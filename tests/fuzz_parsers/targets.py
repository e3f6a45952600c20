"""The parsers: each with valid inputs, and a call that must succeed or raise a UserError."""

import dataclasses
import hashlib
import json
import random
import shutil
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import echelon.data.corpus
from echelon.models import build, preset, read_image_config
from echelon.models.hf.folder import load_hf, save_hf
from echelon.models.image.config import config_to_json, image_preset
from echelon.plan import Plan
from echelon.planner import partition, read_profile
from echelon.program import build as build_schedule
from echelon.program import load_schedule, show, simulate
from echelon.state.checkpoint.manifest import MANIFEST, to_bytes
from echelon.state.checkpoint.saved import SavedParameter, SavedState
from echelon.state.weight_files.weight_folder import INDEX, WEIGHTS
from echelon.train.jobs.job import Job, as_plain
from echelon.train.jobs.job_file import read_job
from echelon.train.jobs.job_rules import check
from echelon.train.runs.resume import resume
from tests.fuzz_parsers import grammar
from tests.fuzz_parsers.mutate import change_bytes, change_value, to_json
from tests.state.checkpoint.small import FILES, record_of, small_manifest, write_small

Parse = Callable[[bytes], object]
Draw = Callable[[random.Random], bytes]


class Target(NamedTuple):
    """A parser of bytes, and how to draw inputs for it. `share` is its part of all inputs."""

    name: str
    parse: Parse
    draw: Draw
    share: int
    valid: list[bytes]


def targets(folder: Path) -> list[Target]:
    """All of them; their files go into `folder`."""
    echelon.data.corpus.read_stdlib = lru_cache(echelon.data.corpus.read_stdlib)
    plans = [b"data=2", b"data=2 zero=3 expert=2", b"pipeline=3-1 microbatches=4"]
    return [
        Target("plan", _plan, _texts(plans, grammar.plan), 16, plans),
        _jobs(folder / "job"),
        _runs(folder / "run"),
        *_profiles(folder / "profile"),
        _schedules(folder / "schedule"),
        *_checkpoints(folder / "checkpoint"),
        *_folders(folder / "hf"),
    ]


def _texts(valid: list[bytes], make: Draw | None = None) -> Draw:
    """Changed bytes of valid inputs, and those of a grammar."""

    def draw_one(draw: random.Random) -> bytes:
        if make is None or draw.random() < 0.4:
            return change_bytes(draw.choice(valid), valid, draw)
        text = make(draw)
        return change_bytes(text, valid, draw) if draw.random() < 0.2 else text

    return draw_one


def _values(valid: list[Any], write: Callable[[Any], bytes] = to_json) -> Draw:
    """Changed values of valid ones, and changed bytes."""
    texts = [write(value) for value in valid]

    def draw_one(draw: random.Random) -> bytes:
        if draw.random() < 0.3:
            return change_bytes(draw.choice(texts), texts, draw)
        return write(change_value(draw.choice(valid), draw))

    return draw_one


def _plan(data: bytes) -> object:
    return str(Plan.parse(data.decode("utf-8", "surrogateescape")))


def _jobs(folder: Path) -> Target:
    folder.mkdir()
    (folder / "text.txt").write_text("to be or not to be " * 500)
    path = folder / "job.toml"
    source = {"data": {"source": str(folder / "text.txt")}, "out": str(folder)}
    full = as_plain(Job()) | source
    full["model"] = {"preset": "gpt-tiny", "layers": 2, "width": 64, "heads": 4, "vocab": 256}
    images = {"task": "images", "model": {"preset": "vgg16-tiny"}, "plan": "data=2"}
    small = {
        "steps": 3,
        "plan": "data=2 zero=1",
        **source,
        "optimizer": {"name": "sgd", "betas": [0.9, 0.95]},
    }
    valid = [full, small, images, {"sequence": 32, **source}]

    def parse(data: bytes) -> None:
        path.write_bytes(data)
        check(read_job(path))

    def draw_one(draw: random.Random) -> bytes:
        text = grammar.toml(change_value(draw.choice(valid), draw), draw)
        return change_bytes(text, [text], draw) if draw.random() < 0.3 else text

    return Target("job", parse, draw_one, 5, [grammar.toml(each, random.Random(0)) for each in valid])


def _runs(folder: Path) -> Target:
    """The run.json of a run that goes on."""
    folder.mkdir()
    (folder / "text.txt").write_text("to be or not to be " * 500)
    job = as_plain(Job()) | {"data": {"source": str(folder / "text.txt")}, "out": str(folder)}
    about = {"state": "failed", "started": "2026", "job": json.loads(json.dumps(job)), "plan": "data=2"}

    def parse(data: bytes) -> None:
        (folder / "run.json").write_bytes(data)
        resume(folder, (), None)

    return Target("run.json", parse, _values([about]), 3, [to_json(about)])


def _profiles(folder: Path) -> list[Target]:
    folder.mkdir()
    path = folder / "profile.json"
    node = {"forward_seconds": 1e-3, "backward_seconds": 2e-3, "output_bytes": 4096, "parameter_bytes": 65536}
    nodes = [{"name": str(n), "about": "Linear", **node} for n in range(4)]
    head = {"format": "echelon-profile", "version": 1}
    edges = [["0", "1"], ["0", "2"], ["1", "3"], ["2", "3"]]
    valid = [{**head, "nodes": nodes}, {**head, "nodes": nodes, "edges": edges, "tied": [["0", "3"]]}]

    def parse(data: bytes) -> None:
        path.write_bytes(data)
        profile = read_profile(path)
        partition(profile, 3, 1e9)

    graph = b"node1 -- Linear -- " + b", ".join(
        b"%s=1.0" % key for key in (b"forward_compute_time", b"backward_compute_time", b"activation_size")
    )
    graph += b", parameter_size=0.0\n"
    return [
        Target("profile", parse, _values(valid), 14, [to_json(each) for each in valid]),
        Target("graph.txt", parse, _texts([graph], grammar.graph_text), 10, [graph]),
    ]


def _schedules(folder: Path) -> Target:
    folder.mkdir()
    path = folder / "schedule.txt"
    names = (("1f1b", (1, 1), 3, 1), ("gpipe", (1, 1, 1), 2, 1), ("interleaved", (1, 1), 2, 2))
    valid = [show(build_schedule(name, replicas, m, c)).encode() for name, replicas, m, c in names]

    def parse(data: bytes) -> None:
        path.write_bytes(data)
        simulate(load_schedule(path))

    return Target("schedule", parse, _texts(valid, grammar.schedule), 14, valid)


def _checkpoints(folder: Path) -> list[Target]:
    manifest = write_small(folder)
    plain = json.loads(json.dumps(dataclasses.asdict(manifest)))
    header = {
        "bias/value": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
        "weight/value@1,0": {"dtype": "F32", "shape": [2, 4], "data_offsets": [12, 44]},
    }

    def rehash(value: Any) -> bytes:
        """Damage that the manifest's own hash does not tell."""
        rest = to_json(value)[1:] if isinstance(value, dict) else to_json(value)
        return _with_hash(rest)

    def open_manifest(data: bytes) -> None:
        if data[:1] != b"{" or b"\n" not in data:
            data = _with_hash(data)
        (folder / MANIFEST).write_bytes(data)
        saved = SavedState.open(folder)
        for name in saved.manifest.tensors:
            parameter = SavedParameter(saved, name, lambda _: [])
            for part in parameter.parts:
                parameter.whole(part)

    def open_header(data: bytes) -> None:
        (folder / FILES[1]).write_bytes(data)
        files = {**manifest.files, FILES[1]: record_of(folder / FILES[1])}
        try:
            open_manifest(small_manifest(files).as_bytes())
        finally:
            write_back()

    original = (folder / FILES[1]).read_bytes()

    def write_back() -> None:
        (folder / FILES[1]).write_bytes(original)

    return [
        Target("manifest", open_manifest, _values([plain], rehash), 20, [rehash(plain)]),
        Target("checkpoint file", open_header, _values([header], _tensor_file), 6, [original]),
    ]


def _with_hash(rest: bytes) -> bytes:
    """Any bytes behind the first line of a manifest, with their hash in it."""
    head, _, _ = to_bytes({"": 0}).partition(b"\n")
    digest = hashlib.sha256(rest).hexdigest().encode()
    return head[:-66] + digest + b'",\n' + rest


def _tensor_file(header: Any) -> bytes:
    text = to_json(header)
    return len(text).to_bytes(8, "little") + text + bytes(44)


def _folders(folder: Path) -> list[Target]:
    """Folders of Hugging Face: config.json, the index, and the header of a file."""
    sizes = {"layers": 2, "width": 16, "vocab": 32, "sequence": 16}
    configs = {}
    for name in ("gpt-tiny", "llama-tiny", "moe-tiny"):
        model = build(dataclasses.replace(preset(name), **sizes, heads=2, kv_heads=None, ffn=None))
        save_hf(model, folder / name, shard_bytes=4000 if name == "llama-tiny" else 10**9)
        configs[name] = json.loads((folder / name / "config.json").read_bytes())
    images = folder / "images"
    images.mkdir()
    image_config = config_to_json(image_preset("vgg16-tiny"), "float32")

    def parse_image_config(data: bytes) -> None:
        (images / "config.json").write_bytes(data)
        read_image_config(images)

    def parse_in(name: str, file: str, data: bytes) -> None:
        (folder / name / file).write_bytes(data)
        load_hf(folder / name)

    shutil.copytree(folder / "llama-tiny", folder / "sharded")
    shutil.copytree(folder / "moe-tiny", folder / "single")
    index = json.loads((folder / "sharded" / INDEX).read_bytes())
    weights = (folder / "single" / WEIGHTS).read_bytes()
    length = int.from_bytes(weights[:8], "little")
    header, values = json.loads(weights[8 : 8 + length]), weights[8 + length :]

    def weight_file(value: Any) -> bytes:
        text = to_json(value)
        return len(text).to_bytes(8, "little") + text + values

    return [
        *(
            Target(
                f"{name} config", partial(parse_in, name, "config.json"), _values([each]), 2, [to_json(each)]
            )
            for name, each in configs.items()
        ),
        Target("image config", parse_image_config, _values([image_config]), 2, [to_json(image_config)]),
        Target("index", partial(parse_in, "sharded", INDEX), _values([index]), 2, [to_json(index)]),
        Target("weights", partial(parse_in, "single", WEIGHTS), _values([header], weight_file), 2, [weights]),
    ]
