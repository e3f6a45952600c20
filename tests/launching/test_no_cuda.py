import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "scripts" / "cuda_check.py"


def test_the_fork_server_asks_nvml_for_cuda_and_ranks_ask_cuda() -> None:
    paths = os.pathsep.join([str(SCRIPT.parent), *sys.path])  # the fork server has the path of its start
    done = subprocess.run(
        [sys.executable, SCRIPT], env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE, check=True
    )
    assert json.loads(done.stdout) == ["1", None]
