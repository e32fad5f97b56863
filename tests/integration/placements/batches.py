"""Random batches; the second one of each kind has fewer rows."""

import torch
from torch import Tensor


def batches(
    num_steps: int, rows: int, *shape: int, dtype: torch.dtype = torch.float32
) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(rows if step != 1 else rows // 2 + 1, *shape, generator=generator).to(dtype),
            "y": torch.randint(0, 5, (rows if step != 1 else rows // 2 + 1,), generator=generator),
        }
        for step in range(num_steps)
    ]


def texts(num_steps: int, rows: int, num_words: int = 40) -> list[dict[str, Tensor]]:
    """Return batches of six words a row, few of them frequent; the second has fewer rows than seven."""
    generator = torch.Generator().manual_seed(2)
    sizes = [rows if step != 1 else 5 for step in range(num_steps)]
    return [
        {
            "x": (torch.rand(size, 6, generator=generator) ** 3 * num_words).long(),
            "y": torch.randint(0, 5, (size,), generator=generator),
        }
        for size in sizes
    ]
