"""Users' hooks on parameters: refuses those that would see partial sums, warns about the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from samestep.errors import UsageError, warn

__all__ = ["HookCheck"]

_MOST_NAMES = 4
_hooks = attrgetter("_post_accumulate_grad_hooks", "_backward_hooks")
_Hooks = tuple[Mapping[int, Any] | None, Mapping[int, Any] | None]


class HookCheck:
    """Looks at the hooks of the parameters, if any hook was registered since it looked last."""

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        self._names = names
        self._parameters = parameters
        self._none = [(None, None)] * len(parameters)
        self._next_id = -1  # of torch's next hook, when the last look found nothing to refuse
        self._reported: set[str] = set()

    def __call__(self, *, warns: bool) -> None:
        """Refuse users' post-accumulate-grad hooks; if `warns`, warn once what hooks on gradients see."""
        next_id = RemovableHandle.next_id
        if next_id == self._next_id:  # no hook was registered in this process since
            return
        held = list(map(_hooks, self._parameters))
        if held != self._none:
            self._look(held, warns=warns)
        self._next_id = next_id

    def _look(self, held: Sequence[_Hooks], *, warns: bool) -> None:
        foreign = [name for name, (after, _) in zip(self._names, held, strict=True) if _is_users(after)]
        if foreign:
            raise UsageError(
                f"{', '.join(foreign[:_MOST_NAMES])}: a post-accumulate-grad hook would see partial sums "
                "over towers, which depend on the number of workers; remove it, and do its work, such as "
                "clipping or optimizer.step(), after average()"
            )
        hooked = [name for name, (_, before) in zip(self._names, held, strict=True) if _is_users(before)]
        new = [name for name in hooked if name not in self._reported]
        self._reported.update(new)
        if new and warns:
            warn(
                f"a hook on {', '.join(new[:_MOST_NAMES])} sees each tower's summed gradient, divided by the "
                "largest power of two that is at most the batch's rows, not the mean: factors and masks are "
                "exact, thresholds are not; apply thresholds after average()"
            )


def _is_users(hooks: Mapping[int, Any] | None) -> bool:
    """Whether any of the hooks is not samestep's own."""
    functions = [getattr(hook, "func", hook) for hook in (hooks or {}).values()]
    return any(not (getattr(each, "__module__", "") or "").startswith("samestep.") for each in functions)
