"""An optimizer whose state and work are divided among the workers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import is_not
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

from samestep.batches.columns import Whole
from samestep.batches.fingerprint import fingerprint
from samestep.errors import ConfigError, DisagreementError, UsageError, shown
from samestep.sharding.cuts import divide
from samestep.sharding.inner_optimizer import InnerOptimizer, group_of, settings_in
from samestep.sharding.separable import check_separable
from samestep.sharding.shards import Shard, gather
from samestep.sharding.update import Update
from samestep.towers.division import Division, UpdatesShards
from samestep.towers.optimizer import settings_of
from samestep.towers.result import StepResult
from samestep.towers.towers import Towers
from samestep.watching.model.optimizer_steps import step_hooks
from samestep.workers.agreement import agree
from samestep.workers.collectives import post_to_all, unbroken

__all__ = ["ShardedOptimizer"]

_ELEMENTWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop)
"""Optimizers of torch that compute each element only from elements at the same index; no subclasses."""


class ShardedOptimizer(Optimizer, UpdatesShards):
    """An optimizer whose state is divided among the workers: each keeps and updates about 1/W of it.

    Weights and checkpoints have the bits of the plain optimizer, on any number of workers. All workers must
    create it, and call `step`, `state_dict` and `add_param_group`, which exchange messages. In `step` each
    worker updates its shard and sends it to the others. After `towers.average()` every worker has all
    averages as `p.grad`; within a `Step` it has only its shard's, and afterwards every `p.grad` is None.

    The elementwise optimizers of torch (SGD, Adam, AdamW, RMSprop, Adagrad, ...) update pieces of parameters.
    All others (Muon, Adafactor, your own classes) update whole parameters, so a large parameter belongs to a
    single worker. So does a parameter with sparse gradients, and, on a CPU with several threads per worker,
    every parameter, because kernels split tensors among threads by their sizes.

    If a worker is lost, its shard is lost, too: the others end, and the run continues from a checkpoint.

    Args:
        towers: the towers that average the gradients.
        optimizer_class: such as `torch.optim.AdamW`; it must not need a closure.
        params: parameters, named parameters or groups, as for that class; by default all of `towers`.
        defaults: other arguments of that class, such as `lr`.

    Attributes:
        optimizer_class: see above.
        param_groups: of all parameters, for schedulers and the like.
        state: of this worker's shard; the keys are parameters, or flat views of them. To look up a parameter
            that other workers update, fully or in part, is a `UsageError`.

    Raises:
        ConfigError: the class needs closures, or its update of one parameter reads others, as with a norm of
            all gradients; it is `differentiable`; a parameter is listed twice, or is not dense.
        DisagreementError: workers have different settings or gradients, or one raised an error.
        UsageError: in `step`, a gradient is not an average of `towers`, the shape of a parameter has
            changed, or an earlier update failed on some workers only; or the optimizer is copied or pickled.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> towers = Towers(model, 4)
        >>> optimizer = ShardedOptimizer(towers, torch.optim.AdamW, lr=0.1)
        >>> for tower in towers(torch.randn(10, 2)):
        ...     tower.backward(model(tower.batch).square().mean())
        >>> report = towers.average()
        >>> optimizer.step()
        >>> list(optimizer.state_dict()["state"][0])
        ['step', 'exp_avg', 'exp_avg_sq']
    """

    def __init__(
        self, towers: Towers, optimizer_class: type[Optimizer], params: Any = None, **defaults: Any
    ) -> None:
        if not isinstance(towers, Towers):
            raise ConfigError(
                f"towers is a {type(towers).__name__}: expected the samestep.Towers of the model"
            )
        self.optimizer_class = optimizer_class
        self._towers = towers
        self._inner: InnerOptimizer | None = None
        self._shards: list[list[Shard]] = []  # of each parameter
        self._elsewhere: set[int] = set()  # ids of parameters that other workers update, fully or in part
        self._loads = [0] * towers.job.world_size
        self._loaded = 0  # a checksum of all loaded states
        self._dropped = -1  # `towers.step` when a `Step` last dropped its gradients
        self._half_done: str | None = None  # an update that failed on some workers alone
        error: Exception | None = None
        try:
            self._make(towers._root.parameters() if params is None else params, defaults)
        except Exception as found:
            error = found
        self._agree("ShardedOptimizer", error)

    def _make(self, params: Any, defaults: Mapping[str, Any]) -> None:
        made = self.optimizer_class
        if not (isinstance(made, type) and issubclass(made, Optimizer)):
            raise ConfigError(f"optimizer_class = {shown(made)}: expected a class, such as torch.optim.AdamW")
        super().__init__(params, {})
        own = self._shard(self.param_groups)
        if made not in (*_ELEMENTWISE, SparseAdam):  # SparseAdam takes no dense gradients
            groups = [group_of(group, shards) for group, shards in zip(self.param_groups, own, strict=True)]
            check_separable(made, groups, defaults, self._towers.job.device)
        self._inner = InnerOptimizer(self, made, own, self._elsewhere, defaults)
        self.defaults = self._inner.optimizer.defaults
        if any(group.get("differentiable") for group in self.param_groups):
            raise ConfigError(
                "differentiable = True: no gradient flows through a sharded update; leave it out"
            )
        if getattr(self._inner.optimizer, "_step_supports_amp_scaling", False):
            self._step_supports_amp_scaling = True

    def _agree(self, where: str, error: Exception | None) -> None:
        """Raise on all workers if one has an error, or differs from the others."""
        must_match: dict[str, Any] = {}
        if error is None:
            names = {id(p): name for name, p in self._towers._root.named_parameters()}
            parameters = [shards[0].parameter for shards in self._shards]
            must_match = {"optimizer": self.optimizer_class.__name__, "CPU threads": torch.get_num_threads()}
            must_match["parameters"] = [
                f"{names.get(id(p), 'one that is not of the model')} {list(p.shape)} strides {p.stride()} "
                f"{p.dtype}{'' if p.requires_grad else ', frozen'}"
                for p in parameters
            ]
            must_match |= {name: repr(value) for name, value in settings_of(self).items()}
        agree(self._towers.job, must_match, where=where, error=error)

    def _shard(self, groups: Sequence[Mapping[str, Any]]) -> list[list[Shard]]:
        """Divide the parameters of new groups; return this worker's shards in each of them."""
        rank, parameters = self._towers.job.rank, [p for group in groups for p in group["params"]]
        is_elementwise = self.optimizer_class in _ELEMENTWISE
        found = divide(parameters, self._towers, self._loads, is_elementwise=is_elementwise)
        self._shards += [found[id(p)] for p in parameters]
        self._elsewhere |= {id(p) for p in parameters if {s.worker for s in found[id(p)]} != {rank}}
        each = ((s[0].parameter, [(shard.worker, shard.elements) for shard in s]) for s in self._shards)
        self._division = Division({id(parameter): shards for parameter, shards in each})
        self._update: Update | None = None
        return [[s for p in group["params"] for s in found[id(p)] if s.worker == rank] for group in groups]

    def __repr__(self) -> str:
        return super().__repr__().replace("(", f"of {self.optimizer_class.__name__} (", 1)

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError(
            "a ShardedOptimizer cannot be copied or pickled, because its state is spread over all workers: "
            "call state_dict() on all of them"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, on all workers; see `torch.optim.Optimizer`."""
        if self._inner is None:  # torch's __init__ calls it
            super().add_param_group(param_group)
            return
        error: Exception | None = None
        try:
            given = {"params", *param_group}  # to which torch adds defaults
            super().add_param_group(param_group)
            (own,) = self._shard(self.param_groups[-1:])
            self._inner.add_group(own, given)
        except Exception as found:
            error = found
        self._agree("add_param_group", error)

    # ---- an update -----------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters, on all workers, after `towers.average()`.

        Args:
            closure: called once, before the update, with gradients enabled; its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        job, update = self._towers.job, self._current_update()
        where = f"step {max(0, self._towers.step - 1)}, the update"
        if self._half_done is not None:
            raise UsageError(
                f"{where}: {self._half_done} failed, after some workers had updated their shard: load a "
                "checkpoint first"
            )
        with unbroken(job.transport, where):
            words, error = self._update_own(update)
            header = torch.tensor([error is not None, zlib.crc32(repr(words).encode())], device="cpu")
            headers = [torch.empty_like(header) for _ in range(job.world_size)]
            headers[job.rank] = header
            contents = zip(headers, update.contents(job.transport), strict=True)
            post_to_all(job.transport, [[each, *content] for each, content in contents], where).wait()
        if error is not None or any(not torch.equal(each, header) for each in headers):
            self._update = None  # its hashes may be a step apart
            if not all(each[0] for each in headers):
                self._half_done = where
            agree(job, words, where=where, error=error)
            raise DisagreementError(
                f"{where}: workers differ, but the difference could not be identified: expected the same "
                "gradients and settings on all workers"
            )
        sharded = self._last_sharded()
        updated = (
            [p for p in update.parameters if p.grad is not None] if sharded is None else sharded.averaged
        )
        increment_version(updated)  # their memory has changed
        if sharded is not None:
            sharded.own_averages = None
        return loss

    def _last_sharded(self) -> StepResult | None:
        """Return the last step if each worker has only its shard of the averages; None otherwise."""
        last = getattr(self._towers, "_last", None)
        return None if last is None or last.own_averages is None else last

    def _division_now(self) -> Division | None:
        # A hook may read any `p.grad`.
        return None if step_hooks(self) else self._division

    def _take_averages(self) -> list[Tensor] | None:
        sharded = self._last_sharded()
        if sharded is None or self._inner is None:
            return None
        own = self._inner.shards
        if sharded.own_averages:
            averages, sharded.own_averages = sharded.own_averages, []
            parameters = sharded.run.parameters
            found = {(id(parameters[index]), start): gradient for index, start, gradient in averages}
            for shard in own:
                shard.tensor.grad = found.get((id(shard.parameter), shard.elements.start))
        return [shard.tensor for shard in own if shard.tensor.grad is not None]

    def _let_go(self) -> None:
        self._dropped = self._towers.step
        for shards in self._shards:
            for shard in shards:
                shard.tensor.grad = shard.parameter.grad = None
        if (sharded := self._last_sharded()) is not None:
            sharded.own_averages = None

    def _current_update(self) -> Update:
        """Return the exchange for the parameters that were averaged last."""
        towers = self._towers
        averaged = towers._last.run.parameters if hasattr(towers, "_last") else ()
        if self._update is None or self._update.averaged is not averaged:
            self._update = Update(averaged, self._shards, towers._root, towers.job.world_size)
        return self._update

    def _update_own(self, update: Update) -> tuple[dict[str, Any], Exception | None]:
        """Update this worker's shard; return what must be the same on all workers, and any error.

        Errors are returned, because the other workers wait for this shard's message.
        """
        words: dict[str, Any] = {}
        try:
            self._check_groups()
            if self._dropped == self._towers.step and all(s[0].parameter.grad is None for s in self._shards):
                raise UsageError(
                    "step() has no gradients, because a Step has already taken this update, and dropped "
                    "them: leave out this call"
                )
            update.look()
            if self._towers.job.world_size > 1:
                words |= {name: repr(value) for name, value in settings_of(self).items()}
                words["states that were loaded"] = self._loaded
                found = {} if self._last_sharded() else update.hashes(self._towers.step)
                words |= {f"hash of {name}": value for name, value in found.items()}
            self._update_shards()
        except Exception as error:
            return words, error
        return words, None

    def _check_groups(self) -> None:
        listed = [parameter for group in self.param_groups for parameter in group["params"]]
        sharded = [shards[0].parameter for shards in self._shards]
        if len(listed) != len(sharded) or any(map(is_not, listed, sharded)):
            raise UsageError(
                f"param_groups have {len(listed)} parameters, which are not the {len(sharded)} that are "
                "sharded, in this order: add parameters by add_param_group(), and to remove, replace or "
                "reorder them, create a new ShardedOptimizer"
            )

    def _update_shards(self) -> None:
        assert self._inner is not None
        self._inner.take_state()
        self._take_averages()
        self._inner.step(self._towers.job.device)

    # ---- state ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the plain optimizer's state, copied to host memory; all workers must call this."""
        return self._gathered(range(self._towers.job.world_size))

    def _gathered(self, targets: Sequence[int]) -> dict[str, Any]:
        """Return the plain optimizer's state on some workers, an empty one on others; all must call this."""
        own = self.state
        self.state = gather(self._shards, own, self._towers.job, targets)  # type: ignore[assignment]
        try:
            return super().state_dict()
        finally:
            self.state = own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this worker's shard of a state from `state_dict`, of a sharded or the plain optimizer.

        All workers must call this with the same state; the next `step` compares what they have loaded.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups, all_saved = self.param_groups, state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(saved["params"]) for saved in all_saved]:
            raise ValueError("loaded state dict has other groups, or other numbers of parameters in them")
        saved_keys = chain.from_iterable(saved["params"] for saved in all_saved)
        for key, shards in zip(saved_keys, self._shards, strict=True):
            shards[0].check(state_dict["state"].get(key, {}))  # all of it, so that all workers raise alike
        assert self._inner is not None
        self._inner.load_state_dict(state_dict)
        for group, saved, its in zip(groups, all_saved, self._inner.optimizer.param_groups, strict=True):
            kept = {name: group[name] for name in ("params", "param_names") if name in group}
            loaded = {**saved, **settings_in(its), "params": kept["params"]}
            group.clear()
            group.update({**loaded, **{n: v for n, v in kept.items() if n not in loaded}})
        self._loaded = zlib.crc32(fingerprint(Whole(state_dict)).to_bytes(4), self._loaded)
        self._half_done = None
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _keep(self) -> Callable[[], None]:
        """Return a function that restores this worker's current state after another was loaded."""
        assert self._inner is not None
        put_inner_back, groups = self._inner.keep(), [dict(group) for group in self.param_groups]
        loaded, half_done = self._loaded, self._half_done

        def put_back() -> None:
            put_inner_back()
            self._loaded, self._half_done = loaded, half_done
            for group, before in zip(self.param_groups, groups, strict=True):
                group.clear()
                group.update(before)

        return put_back
