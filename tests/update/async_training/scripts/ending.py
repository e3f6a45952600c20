"""A plain script. argv: who makes more steps than the others; let-go or kept: the engine; a folder, or not.

Without a folder it is one rank, whose number is in its environment. With one it becomes three, which share
the cost of the imports; what each of them prints is there in files, and so is how it ended.
"""

import os
import sys
from pathlib import Path

import torch._dynamo  # noqa: F401 (which torch would import later, in every rank)

import echelon
from tests.cases import Perceptron, adamw, mean_loss, vectors


def main(longest: int, let_go: bool) -> None:
    engine = echelon.parallelize(
        Perceptron(), "data=3 sync=async staleness=1", optimizer=adamw, loss=mean_loss
    )
    # With staleness 1 the one with more steps goes on only when the others have left.
    steps = 10 if engine.replica == longest else 2
    for step in range(steps):
        engine.step(engine.local(vectors(step)))
    if not let_go:
        globals()["engine"] = engine  # so that it is there until the interpreter ends
    print(f"rank {os.environ['RANK']} made {steps} steps")


def become_ranks(folder: Path) -> None:
    """Returns in every rank, and never in the process that was there before: that waits for them."""
    ranks = []
    for rank in range(int(os.environ["WORLD_SIZE"])):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            os.environ["RANK"] = str(rank)
            for number, stream in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(folder / f"{stream}-{rank}", os.O_WRONLY | os.O_CREAT), number)
            return
    for rank, process in enumerate(ranks):
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        (folder / f"code-{rank}").write_text(str(code), encoding="utf-8")
    os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) > 3:
        become_ranks(Path(sys.argv[3]))
    main(int(sys.argv[1]), sys.argv[2] == "let-go")
