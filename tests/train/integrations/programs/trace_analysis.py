"""HolisticTraceAnalysis of the traces in FOLDER: its percentages of each rank, as JSON on the last line."""

import json
import logging
import os
import sys
import warnings

warnings.simplefilter("ignore")
from hta.trace_analysis import TraceAnalysis  # noqa: E402

logging.disable(logging.CRITICAL)


def main() -> None:
    traces = dict(enumerate(sorted(sys.argv[1:])))
    analysis = TraceAnalysis(
        trace_files=traces, trace_dir=os.environ["FOLDER"], include_last_profiler_step=True
    )
    overlap = analysis.get_comm_comp_overlap(visualize=False).set_index("rank")["comp_comm_overlap_pctg"]
    times = analysis.get_temporal_breakdown(visualize=False).set_index("rank")
    found = {}
    for rank in traces:
        idle, _ = analysis.get_idle_time_breakdown(ranks=[rank], visualize=False)
        found[rank] = {
            "overlap": float(overlap[rank]),
            "idle": float(times["idle_time_pctg"][rank]),
            "compute": float(times["compute_time_pctg"][rank]),
            "exposed": float(times["non_compute_time_pctg"][rank]),
            "idle_by": {
                f"{int(row.stream)} {row.idle_category}": float(row.idle_time) for row in idle.itertuples()
            },
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
