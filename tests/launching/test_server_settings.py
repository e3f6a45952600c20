import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "scripts" / "server_settings.py"


def test_the_fork_server_asks_nvml_for_cuda_and_collects_no_garbage_but_ranks_do_as_usual() -> None:
    paths = os.pathsep.join([str(SCRIPT.parent), *sys.path])  # the fork server has the path of its start
    done = subprocess.run(
        [sys.executable, SCRIPT], env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE, check=True
    )
    in_server, in_rank, frozen = json.loads(done.stdout)
    assert in_server == ["1", False]
    assert in_rank == [None, True]
    assert frozen > 10_000, "ranks share the memory of what the server has imported"
