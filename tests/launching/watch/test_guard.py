import subprocess
import sys
from pathlib import Path


def test_an_unguarded_launch_is_explained_once() -> None:
    script = Path(__file__).parents[1] / "scripts" / "unguarded.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert done.stderr.count("UserError: The main module launches ranks while it is imported") == 1
    assert 'if __name__ == "__main__":' in done.stderr
