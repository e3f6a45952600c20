"""Runs a pair of docs/migrate.md on two ranks, and prints the losses of the global batches."""

import json
import os
import sys
from contextlib import redirect_stdout

os.environ["DS_ACCELERATOR"] = "cpu"
import torch.distributed as dist

from tests.test_migrate import run_pair

if __name__ == "__main__":
    dist.init_process_group("gloo")
    with redirect_stdout(sys.stderr):
        losses = run_pair(sys.argv[1])
    of_ranks = [losses] * dist.get_world_size()
    dist.all_gather_object(of_ranks, losses)
    if dist.get_rank() == 0:
        theirs = [sum(parts) / 2 for parts in zip(*(each["theirs"] for each in of_ranks), strict=True)]
        print(json.dumps({"theirs": theirs, "ours": losses["ours"]}), flush=True)
    dist.destroy_process_group()
