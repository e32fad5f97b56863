"""This worker's copy of the model: checks that it can be trained, and the plans of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from operator import attrgetter, is_not
from types import NoneType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from samestep.arguments import check_kind, whole
from samestep.buffers.model_buffers import ModelBuffers
from samestep.buffers.named_tensors import find_named_buffers
from samestep.buffers.policies import Policy, check_policies
from samestep.buffers.statistics import Mode, check_norms
from samestep.errors import ConfigError
from samestep.summation.gradient_sum import GradientSum
from samestep.summation.layout import Layout
from samestep.summation.placement import Placement
from samestep.summation.plan import ParameterLayout, Plan, grad_dtype
from samestep.summation.sparse import find_sparse, sparse_weights
from samestep.towers.division import Division
from samestep.towers.new_tensors import NewTensors, named_tensors
from samestep.towers.root import check_module, check_wrappers, modules_in_list
from samestep.watching.losses.loss_forms import LossForms
from samestep.watching.model.dropped_gradients import DroppedGradients
from samestep.watching.model.hooks import HookCheck
from samestep.watching.model.optimizer_steps import averaged_parameters
from samestep.watching.model.weight_hash import WeightHash
from samestep.watching.watch import Watch
from samestep.workers.default_group import has_group
from samestep.workers.environment import under_launcher, warn_if_unranked, world_size
from samestep.workers.job import Job

__all__ = ["Replica", "Settings", "job_alone"]

_MOST_PLANS = 8
"""How many plans are cached, for programs that alternate between kinds of steps or placements."""

_QUICK = attrgetter("requires_grad", "grad_dtype")  # `grad_dtype` is the dtype if it was not set


@dataclass(frozen=True)
class Settings:
    """The settings of `Towers` that affect the arithmetic; the same on all workers."""

    seed: int
    statistics: Mode
    buffers: Mapping[str, Policy]
    bucket_bytes: int
    accumulate_dtype: torch.dtype | None
    on_zero_count: Literal["raise", "skip"]
    noise_every: int

    def __post_init__(self) -> None:
        ints = {
            "seed": whole("seed", self.seed),
            "bucket_bytes": whole("bucket_bytes", self.bucket_bytes, 1),
            "noise_every": whole("noise_every", self.noise_every, 0, "0 never measures"),
        }
        for name, value in ints.items():
            object.__setattr__(self, name, value)  # an int of Python, also if it was one of NumPy
        check_kind("accumulate_dtype", self.accumulate_dtype, (torch.dtype, NoneType), "a torch.dtype")
        if self.on_zero_count not in ("raise", "skip"):
            raise ConfigError(f"on_zero_count = {self.on_zero_count!r}: expected 'raise' or 'skip'")

    @property
    def must_match(self) -> dict[str, Any]:
        """The settings, in a form that workers can compare."""
        settings = asdict(self)
        policies = list(settings.pop("buffers").items())  # a list, because their order matters
        return settings | {"buffer policies": policies}


@dataclass(frozen=True)
class Kind:
    """What a step's plan depends on besides the model."""

    placement: Placement
    sums: tuple[str, ...] = ()  # names of the loss's sums
    is_whole_batch: bool = False
    division: Division | None = None


def job_alone(model: nn.Module) -> Job:
    """Return a job of this process alone, on the model's device."""
    if has_group() or (under_launcher() and world_size() > 1):
        raise ConfigError("job is missing: there are several workers, so pass job=samestep.init()")
    warn_if_unranked()
    check_module(model)
    parameter = next(model.parameters(), None)
    return Job(torch.device("cpu") if parameter is None else parameter.device)


class Replica:
    """A worker's copy of the model. `plan` checks it for changes before each step, and rebuilds the plan."""

    parameters: list[nn.Parameter]  # those that required grad in the last call of `plan`, in model order
    buffers: ModelBuffers

    def __init__(
        self, model: nn.Module, job: Job, settings: Settings, sparse_parameters: Sequence[nn.Parameter]
    ) -> None:
        self.model = model
        self.job = job
        self.settings = settings
        self._listed_sparse: list[str] = find_sparse(model, sparse_parameters)
        self._sum: GradientSum | None = None
        self.new = NewTensors(model)
        self._plans: dict[Kind, Plan] = {}
        self.has_reentrant = False  # whether a backward may add to a parameter's gradient twice
        self.loss_forms = LossForms()
        self.watch = Watch(model, reads_source=job.is_first)
        self.dropped = DroppedGradients(self.watch.tensors, warns=job.is_first)
        check_wrappers(model)
        check_norms(model, settings.statistics)
        check_policies(find_named_buffers(model), settings.buffers)
        self._look_at_model()

    def plan(self, kind: Kind) -> Plan:
        """Return a step's plan for the model in its current state."""
        self.watch.tensors.note()
        if self._has_changed() or not self.buffers.are_current:
            self.model.zero_grad()  # a parameter that was frozen must not keep its last gradient
            self._look_at_model()
        self.check_hooks()
        plan = self._plans.get(kind)
        if plan is None:
            plan = self._make_plan(kind)
        return plan

    def check_hooks(self) -> None:
        """Refuse hooks that would see partial sums: before a step, and in each pass, which may add one."""
        self._hook_check(warns=self.job.is_first)

    def _make_plan(self, kind: Kind) -> Plan:
        if len(self._plans) > _MOST_PLANS:
            self._plans.clear()
        plain = Kind(kind.placement, division=kind.division)
        if plain not in self._plans:
            plan = Plan.of(kind.placement, self._layouts, self.buffers.layout, self.settings.bucket_bytes)
            owners = None if kind.division is None else kind.division.owners_in(plan, self.parameters)
            plan = plan if owners is None else plan.sharded(owners)
            new, version = tuple(self.new.kinds.items()), self.new.version
            self._plans[plain] = replace(plan, layers=self._layers, new_tensors=new, version=version)
        if kind not in self._plans:
            self._plans[kind] = replace(
                self._plans[plain], sums=kind.sums, is_whole_batch=kind.is_whole_batch
            )
        return self._plans[kind]

    def plan_of(self, parameters: Sequence[Tensor], placement: Placement) -> Plan:
        """Return the plan of a step that trains these parameters, all with dense gradients."""
        layouts = tuple(self._lay_out("", parameter, is_sparse=False) for parameter in parameters)
        return Plan.of(placement, layouts, bucket_bytes=self.settings.bucket_bytes)

    def take_over(self, new: Sequence[tuple[int, dict[str, str]]]) -> None:
        """Take over what all workers know of new tensors, in the first step after a regroup."""
        self.new.take_over(new)
        self._plans = {}

    def forget_plans(self) -> None:
        """Drop all plans after a regroup: this worker's rank may have changed."""
        self._plans = {}
        if self._sum is not None:
            self._sum.close()
            self._sum = None

    def gradient_sum(self, plan: Plan) -> GradientSum:
        """Return the `GradientSum` for a step's plan; reuse the previous one if the buckets are the same."""
        if self._sum is None or self._sum.plan.buckets is not plan.buckets:
            if self._sum is not None:
                self._sum.close()
            self._sum = GradientSum(plan, self.parameters, plan.placement.towers(self.job.rank))
        return self._sum

    def hashes(self, beside: Mapping[str, nn.Module]) -> dict[str, int]:
        """Return a hash of each parameter and buffer; none if the next step will share new tensors.

        Args:
            beside: modules of which to hash these, too, by name; not copies of buffers that nobody shares.
        """
        if self._has_other_entries():
            return {}
        found = self.watch.tensors.hashes_of_all()
        unshared = {name for name, _ in self.model.named_buffers() if name not in found}
        unshared |= {f"module.{name}" for name in unshared}  # in an AveragedModel
        for name, module in beside.items():
            hashes = WeightHash.of_module(module, unshared).by_name()
            found |= {f"{name}.{each}": value for each, value in hashes.items()}
        return found

    def sparse_parameters(self) -> set[int]:
        """Return the ids of parameters that may get sparse gradients, including frozen ones."""
        listed = {id(p) for name, p in self.model.named_parameters() if name in self._listed_sparse}
        return listed | sparse_weights(self.model)

    def _look_at_model(self) -> None:
        """Record the model's current parameters and buffers."""
        self._check_model()
        self.new.note()
        self._registries = [r for m in self.model.modules() for r in (m._parameters, m._modules) if r]
        self._entries = self._current_entries()
        self._all = [p for p in dict.fromkeys(self._entries) if isinstance(p, nn.Parameter)]
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        averaged_parameters[self] = frozenset(map(id, named.values()))
        self.parameters = list(named.values())
        sparse = {*self._listed_sparse, *find_sparse(self.model, ())}
        self._layers = tuple((n or "(model)", type(m).__name__) for n, m in self.model.named_modules())
        self._layouts = tuple(self._lay_out(name, p, name in sparse) for name, p in named.items())
        self._hook_check = HookCheck(list(named), self.parameters)
        self.buffers = ModelBuffers(self.model, self.settings.statistics, self.settings.buffers, self.job)
        self.watch.look_at_model(self.buffers.fixed, self.buffers.shared)
        self._plans = {}
        self._seen, self._seen_quickly = self._kinds(), self._quick_kinds()
        self._num_entries = self.watch.tensors.num_entries

    def _check_model(self) -> None:
        for name, tensor in named_tensors(self.model):
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            if nn.parameter.is_lazy(tensor):
                raise ConfigError(f"{kind} {name} has no shape yet: run the model once before making Towers")
            if tensor.layout != torch.strided:
                raise ConfigError(
                    f"{kind} {name} is {tensor.layout}: workers compare and share dense tensors only; "
                    "register its indices and values, and build the sparse tensor from them in forward"
                )
            if tensor.device != self.job.device:
                raise ConfigError(
                    f"{kind} {name} is on {tensor.device}, the worker's device is {self.job.device}: "
                    "call model.to(job.device) first"
                )
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ConfigError(
                f"{type(self.model).__name__} has no parameter that requires grad: there is nothing to train"
                f"{modules_in_list(self.model)}"
            )

    def _lay_out(self, name: str, parameter: Tensor, is_sparse: bool) -> ParameterLayout:
        dtype = self.settings.accumulate_dtype or grad_dtype(parameter)
        if not is_sparse:
            dtype = dtype.to_real()
        return ParameterLayout(name, Layout.of(parameter, dtype), parameter.dtype, is_sparse)

    def _has_changed(self) -> bool:
        """Whether the model changed since the last check; shapes are compared only if memory moved."""
        if self.watch.tensors.num_entries != self._num_entries or self._has_other_entries():
            return True
        quick = self._quick_kinds()
        if quick == self._seen_quickly:
            return False
        self._seen_quickly = quick
        return self._kinds() != self._seen

    def _has_other_entries(self) -> bool:
        entries = self._current_entries()
        return len(entries) != len(self._entries) or any(map(is_not, entries, self._entries))

    def _current_entries(self) -> list[object]:
        return list(chain.from_iterable(each.values() for each in self._registries))

    def _quick_kinds(self) -> tuple[object, ...]:
        """Return values that change with the parameters' settings or addresses."""
        return list(map(_QUICK, self._all)), self.watch.tensors.pointers

    def _kinds(self) -> list[object]:
        return [(p.requires_grad, p.dtype, p.shape, p.stride(), p.device, p.grad_dtype) for p in self._all]

    def start_from_first_worker(self) -> None:
        """Copy worker 0's values of all new parameters and buffers to all workers."""
        self.new.start_from_first_worker(self.job.transport)
        self._plans = {kind: plan.with_all_shared() for kind, plan in self._plans.items()}
        self.watch.tensors.note()
