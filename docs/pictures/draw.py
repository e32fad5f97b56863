"""Draws the pictures of docs/concepts.md, by `python docs/pictures/draw.py`."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

COLOURS = ("#2a9d8f", "#e9a23b", "#7a6ff0")
GREY = "#7f8c8d"
RANGES = (range(3), range(3, 6), range(6, 8))


def box(axes: Axes, place: tuple[float, float], size: tuple[float, float], text: str, colour: str) -> None:
    """Draw a rectangle with a word in it."""
    (x, y), (width, height) = place, size
    axes.add_patch(plt.Rectangle(place, width, height, facecolor=colour, edgecolor="white", linewidth=1))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color="white", fontsize=9)


def tree(axes: Axes) -> None:
    """Batch, towers, the tree of sums, and which worker adds what."""
    for tower in range(8):
        worker = next(w for w, own in enumerate(RANGES) if tower in own)
        box(axes, (2 * tower, 0), (1.9, 0.6), f"tower {tower}", COLOURS[worker])
        box(axes, (2 * tower, -0.9), (1.9, 0.6), f"{2 * tower}, {2 * tower + 1}", GREY)
    nodes = [
        (2 * tower + 0.95, 0.6, {w for w, own in enumerate(RANGES) if tower in own}) for tower in range(8)
    ]
    height = 0.6
    while len(nodes) > 1:
        height += 0.9
        pairs = zip(nodes[::2], nodes[1::2], strict=True)
        nodes = [join(axes, left, right, height) for left, right in pairs]
    axes.text(
        nodes[0][0],
        nodes[0][1] + 0.3,
        "÷ count = p.grad, on all workers",
        ha="center",
        fontsize=10,
        color=GREY,
    )
    for worker in range(3):
        axes.text(16.3, 2.6 - 0.5 * worker, f"added on worker {worker}", color=COLOURS[worker], fontsize=9)
    axes.text(16.3, -0.6, "rows of the batch", va="center", color=GREY, fontsize=9)
    axes.text(16.3, 3.1, "sent, and added there", color=GREY, fontsize=9)
    axes.set(xlim=(-0.2, 20), ylim=(-1.1, 4.2))


def join(
    axes: Axes, left: tuple[float, float, set[int]], right: tuple[float, float, set[int]], height: float
) -> tuple[float, float, set[int]]:
    """Draw a sum of two; in a worker's colour where it has both."""
    workers = left[2] | right[2]
    colour = COLOURS[min(workers)] if len(workers) == 1 else GREY
    x = (left[0] + right[0]) / 2
    for child in (left, right):
        axes.plot([child[0], child[0], x], [child[1], height, height], color=colour, linewidth=2)
    axes.text(x, height, "+", ha="center", va="center", fontsize=11, color="white",
              bbox={"boxstyle": "circle,pad=0.15", "facecolor": colour, "edgecolor": "none"})  # fmt: skip
    return x, height + 0.17, workers


def step(axes: Axes) -> None:
    """Passes and messages of two workers."""
    for worker, y in enumerate((2.2, 0)):
        axes.text(
            -0.2, y + 0.75, f"worker {worker}", ha="right", va="center", fontsize=10, color=COLOURS[worker]
        )
        for place in range(3):
            box(axes, (3 * place, y + 0.5), (1.1, 0.5), "forward", COLOURS[worker])
            box(
                axes,
                (3 * place + 1.15, y + 0.5),
                (1.75, 0.5),
                f"backward {3 * worker + place}",
                COLOURS[worker],
            )
        for bucket in range(3):
            box(axes, (7.6 + 0.75 * bucket, y - 0.1), (0.7, 0.4), f"{bucket}", GREY)
        box(axes, (10, y + 0.5), (1.2, 0.5), "update", COLOURS[worker])
    axes.text(7.5, 0.1, "buckets on their way ", ha="right", va="center", fontsize=9, color=GREY)
    axes.text(7.5, 2.3, "buckets on their way ", ha="right", va="center", fontsize=9, color=GREY)
    axes.set(xlim=(-1.8, 11.4), ylim=(-0.3, 3.4))


def state(axes: Axes) -> None:
    """What is in a checkpoint, and what is not."""
    kept = ("weights and buffers", "averaged weights", "optimizer, schedule, loss scale", "step, noise scale",
            "position in the data", "settings that bits depend on")  # fmt: skip
    free = ("number of workers", "which towers where", "machine and device", "loader processes", "folder")
    for x, title, names, colour in ((0, "in a checkpoint", kept, COLOURS[0]), (7, "not in it", free, GREY)):
        axes.text(x + 3, 6.3, title, ha="center", fontsize=11, color=colour)
        for row, name in enumerate(names):
            box(axes, (x, 5.2 - row), (6, 0.85), name, colour)
    axes.set(xlim=(-0.2, 13.2), ylim=(-0.1, 6.8))


def main() -> None:
    """Write all pictures beside this file."""
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "samestep", "font.family": "sans-serif"})
    for draw, size in ((tree, (9, 3.2)), (step, (9, 2.6)), (state, (7, 3.2))):
        figure, axes = plt.subplots(figsize=size)
        axes.axis("off")
        draw(axes)
        path = Path(__file__).with_name(f"{draw.__name__}.svg")
        figure.savefig(path, bbox_inches="tight", transparent=True, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
