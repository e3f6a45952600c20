"""What torchtitan makes of configurations: titan_plans.py JSON, of pairs (fields, ranks). Prints the axes."""

import json
import sys

from torchtitan.config import ParallelismConfig
from torchtitan.distributed.parallel_dims import ParallelDims

if __name__ == "__main__":
    axes = []
    for fields, ranks in json.loads(sys.argv[1]):
        dims = ParallelDims.from_config(ParallelismConfig(**fields), ranks)
        axes.append([dims.dp_replicate * dims.dp_shard, dims.dp_shard, dims.tp, dims.pp, dims.cp, dims.ep])
    print(json.dumps(axes))
