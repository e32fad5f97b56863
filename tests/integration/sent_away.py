"""A loop in which a newcomer comes just when it cannot begin: `python sent_away.py FOLDER`."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import samestep


class Left:
    """How many steps are left, once all are there again."""

    steps = 10

    def state_dict(self) -> dict[str, int]:
        """Return it."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take it over."""
        self.steps = state["steps"]


def main(job: samestep.Job) -> None:
    """Lose worker 2 in a call with which no newcomer begins, and worker 1 there when a newcomer is ready."""
    folder, left = Path(sys.argv[1]), Left()
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    towers = samestep.Towers(model, 5, job=job, noise_every=0)
    batch = torch.randn(9, 1)

    def die_once(rank: int, name: str) -> None:
        if job.rank == rank and not (folder / name).exists():
            (folder / name).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def step() -> None:
        for tower in towers(batch):
            tower.backward(model(tower.batch).square().mean())
        towers.average()

    def other() -> None:
        die_once(2, "first")
        if job.world_size < 3 and not (folder / "second").exists():
            while not job.renewable.is_due():
                time.sleep(0.01)
            die_once(1, "second")
        job.barrier()

    with samestep.Elastic(model=model, towers=towers, left=left) as elastic:
        while left.steps:
            elastic(step)
            elastic(other)
            time.sleep(0.02)
            left.steps -= job.world_size == 3 and (folder / "second").exists()


if __name__ == "__main__":
    samestep.launch(main, workers=3, towers=5, device="cpu")
