"""One rank of a plain script. argv: who makes more steps than the others; let-go or kept: the engine."""

import os
import sys
import time

from tests.cases import Perceptron, adamw, mean_loss, vectors

import echelon


def main(longest: int, let_go: bool) -> None:
    engine = echelon.parallelize(
        Perceptron(), "data=3 sync=async staleness=1", optimizer=adamw, loss=mean_loss
    )
    steps = 10 if engine.replica == longest else 2
    for step in range(steps):
        engine.step(engine.local(vectors(step)))
        time.sleep(0.05 if engine.replica == longest else 0)
    if not let_go:
        globals()["engine"] = engine  # so that it is there until the interpreter ends
    print(f"rank {os.environ['RANK']} made {steps} steps")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "let-go")
