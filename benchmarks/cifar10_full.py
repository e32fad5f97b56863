"""The precision after the tutorial's 100,000 steps, taken in many legs on 1, 3 and 2 workers.

    python benchmarks/cifar10_full.py --data-dir DIR --run-dir DIR

Each leg is ended at a given step, by SIGTERM or, for a third of the legs, by SIGKILL between two checkpoints;
the next leg continues with another number of workers. This program can be interrupted and started again, too.
At the end it measures precision @ 1 at 30, 60 and 100% of the steps, and compares the digest at 10% with that
of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

CYCLE = ((1, 2), (3, 8), (2, 10))  # workers, and a leg's length in percent of all steps


def legs(steps: int) -> list[tuple[int, int]]:
    """Return the number of workers of each leg, and the step after which it ends."""
    ends, plan = steps // 300, []  # between two checkpoints
    for _ in range(100 // sum(percent for _, percent in CYCLE)):
        for workers, percent in CYCLE:
            ends += percent * steps // 100
            plan.append((workers, ends))
    return plan


def ending(leg: int) -> signal.Signals:
    """Return the signal that ends a leg."""
    return signal.SIGKILL if (leg + leg // 3) % 3 == 1 else signal.SIGTERM


def command(arguments: argparse.Namespace, run_dir: Path, workers: int, steps: int) -> list[str]:
    """Return the command line of a leg."""
    return [
        *(sys.executable, "-m", "samestep", "train", "cifar10", "--autocast", "bf16", "--towers", "4"),
        *("--data-dir", str(arguments.data_dir), "--run-dir", str(run_dir), "--steps", str(steps)),
        *("--workers", str(workers), "--summary-every", "1000"),
        *("--checkpoint-every", str(arguments.steps // 100), "--keep-every", str(arguments.steps // 10)),
    ]


def train(arguments: argparse.Namespace, leg: int, workers: int, until: int) -> dict[str, object]:
    """Run a leg to its end, and return a record of it."""
    started_s = time.monotonic()
    line, last, is_ended = command(arguments, arguments.run_dir, workers, arguments.steps), 0, False
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
        for text in process.stdout or ():
            found = re.search(r": step (\d+),", text)
            last = int(found[1]) if found else last
            if found is None:
                print(text, end="", flush=True)
            if last >= until and not is_ended:
                process.send_signal(ending(leg))
                is_ended = True
    status = process.returncode
    if not is_ended and status != 0:
        sys.exit(status)  # a signal to this program, or an error
    how = ending(leg).name if is_ended else "done"
    took_s = round(time.monotonic() - started_s, 1)
    return {"workers": workers, "step": last, "ended": how, "status": status, "s": took_s}


def precision(arguments: argparse.Namespace, step: int) -> str:
    """Return the output of `samestep eval` for the checkpoint of a step."""
    alone = arguments.run_dir.with_name(f"{arguments.run_dir.name}-{step}")
    name = f"step-{step:08d}"
    (alone / "checkpoints").mkdir(parents=True, exist_ok=True)
    shutil.copy(arguments.run_dir / "settings.json", alone)
    shutil.copytree(
        arguments.run_dir / "checkpoints" / name, alone / "checkpoints" / name, dirs_exist_ok=True
    )
    line = [sys.executable, "-m", "samestep", "eval", str(alone), "--workers", "2"]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()


def digest(path: Path) -> str:
    """Return the digest of the weights in a checkpoint."""
    line = [sys.executable, "-m", "samestep", "digest", str(path)]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Run the remaining legs, then print their records and the precisions."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100_000)
    arguments = parser.parse_args()
    record = arguments.run_dir.with_name(f"{arguments.run_dir.name}-legs.jsonl")
    plan = legs(arguments.steps)
    while (done := len(record.read_text().splitlines()) if record.exists() else 0) < len(plan):
        entry = train(arguments, done, *plan[done])
        with record.open("a") as file:
            print(json.dumps(entry), file=file)
    print(record.read_text())
    tenth = arguments.steps // 10
    for step in (3 * tenth, 6 * tenth, 10 * tenth):
        print(f"step {step}: {precision(arguments, step)}")
    plain = arguments.run_dir.with_name(f"{arguments.run_dir.name}-uninterrupted")
    subprocess.run(command(arguments, plain, 2, tenth), check=True, stdout=subprocess.DEVNULL)
    name = f"checkpoints/step-{tenth:08d}"
    found = digest(arguments.run_dir / name), digest(plain / name)
    print(f"digest at step {tenth}: {found[0]}, uninterrupted {found[1]}: {found[0] == found[1]}")


if __name__ == "__main__":
    main()
