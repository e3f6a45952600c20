"""The package is pure: plans are drawn and checked where there is neither torch nor a screen."""

import subprocess
import sys


def test_it_imports_neither_torch_nor_what_only_commands_need() -> None:
    code = "import sys, echelon.program, echelon.program.picture; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    modules = set(done.stdout.split())
    assert "echelon.program" in modules
    assert not modules & {"torch", "numpy", "rich", "typer", "pydantic", "PIL"}
