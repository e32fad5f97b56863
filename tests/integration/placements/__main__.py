"""Run all scenarios, or all faults, as a worker of torchrun; worker N writes OUT.N.

python -m tests.integration.placements OUT [scenarios|faults] [DEVICE]
"""

import json
import sys
from pathlib import Path

import samestep

from . import FAULTS, SCENARIOS


def main(out: Path, kind: str = "scenarios", device: str = "cpu") -> None:
    job = samestep.init(device, timeout_s=60)
    runs = {"scenarios": SCENARIOS, "faults": FAULTS}[kind]
    results = {name: run(job) for name, run in runs.items()}
    out.with_suffix(f".{job.rank}").write_text(json.dumps(results))
    job.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
