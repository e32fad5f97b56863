"""Run all programs of this folder on one process and on two, and print each one's distance from the truth."""

import os
import re
import subprocess
import sys
from pathlib import Path

PROGRAMS = [
    "plain",
    "ddp",
    "accelerate_loop",
    "fabric_loop",
    "samestep_loop",
    "accelerate_towers",
    "fabric_towers",
]


def outcome(program: str, num_processes: int) -> tuple[float, str | None]:
    """Run a program; return its distance from the truth, and its digest if it prints one."""
    file = str(Path(__file__).with_name(f"{program}.py"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    command = [sys.executable, *([] if program == "plain" else launcher), file]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return read(
        subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    )


def read(printed: str) -> tuple[float, str | None]:
    """Parse a program's output: its distance from the truth, and its digest or None."""
    distance = re.search(r"distance from the truth (\S+)", printed)
    digest = re.search(r"weights sha256 (\S+)", printed)
    assert distance is not None, printed
    return float(distance[1]), digest and digest[1]


def main() -> None:
    """Print the table."""
    print(f"{'program':18}{'1 process':>12}{'2 processes':>13}  digests")
    for program in PROGRAMS:
        (alone, one), (together, two) = outcome(program, 1), outcome(program, 2)
        same = "" if one is None else "equal" if one == two else "differ"
        both = "" if program == "plain" else f"{together:.1e}"
        print(f"{program:18}{alone:12.1e}{both:>13}  {same}".rstrip())


if __name__ == "__main__":
    main()
