"""The measured process: `python -m lightning_zenflow.cli.bench.child JOB RESULT`, started by `processes.run_job`."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

from .collectives import counting
from .job import Job, Run

_PR_SET_PDEATHSIG = 1


def main(job_json: str, result: str) -> None:
    """Measures the job and has rank 0 write the result.

    Args:
        job_json: The job's fields, as JSON.
        result: Path of the file to write.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # whoever asked is gone, even by SIGKILL: so are we
    job = Job(**json.loads(job_json))
    with counting() as received:
        if job.mode == "zenflow_auto":
            from .trained import measure
        else:
            from .loop import measure
        run: Run = measure(job, received)
    if os.environ.get("RANK", "0") == "0":
        Path(result).write_text(json.dumps(run.as_dict()), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
