"""Operator: the declaration of an operator, and how its calls are served.

A call looks its plan up, checks what its signature does not tell, and launches kernels. The first call of a
signature is validated, and its backend is chosen. A traced call goes through torch.library (`torch_ops.py`) instead.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType, MethodType
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar

import torch

from fastattention.engine import torch_ops
from fastattention.engine.autograd import differentiable, without_autocast
from fastattention.engine.backend import I, O, P
from fastattention.engine.bounded import BoundedDict
from fastattention.engine.checks import require_tensor
from fastattention.engine.eager import runs_eagerly
from fastattention.engine.explain import Explanation, Traffic
from fastattention.engine.kinds import check_kinds, check_readable
from fastattention.engine.registry import B, Registry, chosen
from fastattention.engine.signature import CallSignature, signature_of
from fastattention.errors import ArgumentError

G = TypeVar("G", bound=tuple[Any, ...])  # the tensors of a call as they are given, a NamedTuple
S = TypeVar("S", bound=tuple[Any, ...])  # its options: all scalars, of the right types, a NamedTuple
Arguments = ParamSpec("Arguments")

NO_NAMES: Mapping[str, str] = MappingProxyType({})
_is_profiling = torch._C._autograd._profiler_enabled
_operators: list[Operator[Any, Any, Any, Any, Any, Any]] = []


class Operator(abc.ABC, Generic[G, S, P, I, O, B]):
    """One operator: its arguments, its validation and its backends. How its calls are served follows from these."""

    name: ClassVar[str]  # name in torch.ops.fastattention
    registry: Registry[P, B]
    fallback: ClassVar[str]  # the backend made of operations of torch, which autograd follows
    given: type[G]
    options: type[S]
    inputs: type[I]
    output: type[O]
    tensors: ClassVar[tuple[str, ...]]  # fields of `given` that are arguments of the operator of torch, in order
    scalars: ClassVar[tuple[str, ...]]  # fields of `options` that are, in order
    written: ClassVar[tuple[str, ...]] = ()  # tensors that a call writes in place
    unnamed: ClassVar[tuple[str, ...]] = ()  # tensors that no caller gives
    results: ClassVar[tuple[str, ...]]  # fields of `output` that the operator of torch returns
    asked_by: ClassVar[Mapping[str, str]]  # results that a scalar asks for -> that scalar
    gradients: type[Any] | None = None  # a NamedTuple with the fields of `results`; None without a backward
    broadcast: ClassVar[Mapping[str, int]] = {}  # tensors that may lack the batch, and broadcast to it -> their rank
    offsets: ClassVar[tuple[str, ...]] = ()  # tensors that say where sequences begin which lie one after another

    def __init__(self) -> None:
        self._plans: BoundedDict[object, Plan[G, S, P, I, O, B]] = BoundedDict()
        _operators.append(self)
        torch_ops.register(self)

    @abc.abstractmethod
    def prepare(self, given: G, options: S) -> tuple[P, I]:
        """The problem of a call and its tensors as backends read them. The only validation; raises ArgumentError."""

    @abc.abstractmethod
    def as_read(self, problem: P, inputs: I, names: Sequence[str]) -> I:
        """The given tensors in the strides and dtypes that backends take; names: the tensors to look at."""

    @abc.abstractmethod
    def result_shapes(self, given: G, options: S, differentiated: bool) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        """Shape and dtype of each of `results`, from shapes alone; (0,) for a result that was not asked for."""

    @abc.abstractmethod
    def flops(self, arguments: Mapping[str, Any], backward: bool) -> int:
        """Floating-point operations of a call, as torch counts those of its own attention. Arguments by name."""

    def signature(self, given: G, options: S, backend: str) -> CallSignature | None:
        """Everything that the plan of a call depends on; None for a call that validation must look at."""
        return signature_of(given, backend, options)

    def recheck(self, problem: P) -> Callable[[G, S], I | None] | None:
        """A function that checks what signatures of calls of `problem` do not tell: values, and shared memory.

        It returns the tensors of a call, or None for a call with another problem. None: nothing to check.
        """
        return None

    def inputs_of(self, given: G, inputs: I) -> I:
        """The tensors of a call before `as_read`. inputs: the tensors of the same call after it."""
        return given  # type: ignore[return-value]

    def around(self, backend: B, problem: P, serve: Callable[[I], O]) -> Callable[[I], O]:
        """`serve`, wrapped in what the operator does before and after every call."""
        return serve

    def names_given(self, problem: P, inputs: I) -> dict[str, object]:
        """The tensors of a call by the names that its caller knows."""
        return inputs._asdict()  # type: ignore[attr-defined, no-any-return]

    def scalars_of(self, problem: P) -> S:
        """The scalars that make `problem`, for a call that the operator of torch differentiates."""
        raise NotImplementedError(f"{self.name} has no backward")

    def check_traceable(self, given: G, options: S) -> None:
        """Raises for what the operator of torch cannot take or give. It makes all other checks when it runs."""

    def meta_arguments(self, given: G, options: S) -> tuple[G, S]:
        """The arguments of a call that can be validated on the meta device."""
        return given, options

    def as_torch_takes(self, given: G, options: S) -> tuple[G, S]:
        """Arguments as the operator of torch takes them: tensors where callers may give numbers too."""
        return given, options

    def joined_axes(self, arguments: Mapping[str, Any], mapped: Collection[str]) -> Mapping[str, int] | None:
        """The axes of tensors and results that an axis of torch.vmap joins, for all indices to be one call.

        None: the call runs once for each index, as it does where a mapped tensor has no such axis.
        arguments: by name; mapped: the names of those that have the mapped axis
        """
        return None

    def check_mapped(self, arguments: Mapping[str, Any], mapped: Mapping[str, int | None]) -> None:
        """Raises for a call that torch.vmap cannot map. mapped: the mapped axis of each argument."""

    def traffic(self, backend: B, problem: P, inputs: I) -> Traffic | None:
        """Main-memory traffic of a call; None where there is no model of it."""
        return None

    def __call__(self, given: G, options: S, backend: str) -> O:
        """Serves a call, now or as an operator of torch."""
        signature = self.signature(given, options, backend)
        if signature is None and not runs_eagerly(*given):
            return self._trace(given, options, backend)
        plan, inputs = self._find_plan(given, options, backend, signature)
        return plan.run(inputs)

    def plan(self, given: G, options: S, backend: str) -> tuple[Plan[G, S, P, I, O, B], I]:
        """The plan of a call, and its tensors."""
        return self._find_plan(given, options, backend, self.signature(given, options, backend))

    def _find_plan(
        self, given: G, options: S, backend: str, signature: CallSignature | None
    ) -> tuple[Plan[G, S, P, I, O, B], I]:
        """The plan of a call, and its tensors. signature: None for a call whose plan is not cached."""
        known = self._plans.get(signature)
        if known is not None and (checked := known.checked(given, options)) is not None:
            return known, checked
        problem, inputs = self.prepare(given, options)
        plan = Plan(self, problem, inputs, self.inputs_of(given, inputs), backend)
        if signature is not None:
            self._plans[signature] = plan
        return plan, inputs

    def by_name(self, arguments: Sequence[Any]) -> dict[str, Any]:
        """Positional arguments of the operator of torch by their names; trailing ones may be missing."""
        return dict(zip((*self.tensors, *self.scalars, "backend", "grads"), arguments, strict=False))

    def explain(self, given: G, options: S, backend: str) -> Explanation[P]:
        """Every backend's verdict on a call, which is validated and not computed."""
        if not runs_eagerly(*given):
            raise ArgumentError(
                "explain takes tensors that hold data: not fake ones, and not those of a call under torch.compile"
            )
        problem, inputs = self.prepare(given, options)
        self.registry.check_name(backend)
        considered = tuple(self.registry.verdicts(problem))
        serving = chosen([one for one in considered if backend in ("auto", one.backend)])
        if serving is None:
            return Explanation(problem, considered)
        return Explanation(problem, considered, self.traffic(self.registry.get(serving.backend), problem, inputs))

    def forget_plans(self) -> None:
        """Makes the next calls choose their backends again."""
        self._plans.clear()

    def _trace(self, given: G, options: S, backend: str) -> O:
        required = [name for name in self.tensors if name not in self.given._field_defaults]  # type: ignore[attr-defined]
        for name in required:
            require_tensor(name, getattr(given, name))
        self.registry.check_name(backend)
        if not torch.compiler.is_compiling():  # torch.compile knows no nested tensors and makes all tensors fake
            check_kinds({name: getattr(given, name) for name in self.tensors if name not in self.unnamed})
        self.check_traceable(given, options)
        return torch_ops.call(self, *self.as_torch_takes(given, options), backend)  # type: ignore[no-any-return]


AnyOperator = Operator[Any, Any, Any, Any, Any, Any]


class Plan(Generic[G, S, P, I, O, B]):
    """How calls of one signature are served."""

    def __init__(self, operator: Operator[G, S, P, I, O, B], problem: P, inputs: I, given: I, backend: str) -> None:
        """inputs: the tensors as backends read them; given: the tensors as given."""
        self.operator, self.problem = operator, problem
        self.backend = operator.registry.select(problem, backend)
        self._recheck = operator.recheck(problem)
        self.has_backward = self.backend.has_backward and bool(problem.grads)  # type: ignore[attr-defined]
        # Functions that serve calls without autograd, and with it.
        self.serve = operator.around(self.backend, problem, self.backend.make_call(problem, inputs))
        self.forward = self.serve
        if self.has_backward:
            self.forward = differentiable(operator, self.backend, problem, self.serve)
        elif self.backend.name == operator.fallback:
            self.forward = without_autocast(operator, problem, self.serve)
        self._range = f"fastattention::{self.backend.name}"
        fields = zip(inputs._fields, given, inputs, strict=True)  # type: ignore[attr-defined]
        self._converted = [name for name, before, after in fields if before is not after]

    def checked(self, given: G, options: S) -> I | None:
        """The tensors of a call of this signature; None for a call that validation must look at after all."""
        if self._recheck is None:
            return given  # type: ignore[return-value]
        try:
            return self._recheck(given, options)
        except (RuntimeError, TypeError):
            return None  # validation names the tensor at fault

    def run(self, inputs: I) -> O:
        """Serves a call with the tensors that were given. Profilers see a range with the backend's name."""
        try:
            if self._converted:
                inputs = self.as_read(inputs)
            if _is_profiling():
                with torch.profiler.record_function(self._range):
                    return self.forward(inputs)
            return self.forward(inputs)
        except RuntimeError:
            check_readable(self.operator.names_given(self.problem, inputs))
            raise

    def as_read(self, inputs: I) -> I:
        """The tensors of a call as its kernels read them."""
        return self.operator.as_read(self.problem, inputs, self._converted) if self._converted else inputs


# A Request is a call that can be served or explained; a public function makes it of its arguments. Its last element
# turns the operator's output into the function's result.
Request = tuple[AnyOperator, Any, Any, str, Callable[[Any], Any]]


def serves_requests(
    read: Callable[Arguments, Any], foreign_names: Mapping[str, str] = NO_NAMES
) -> Callable[Arguments, Any]:
    """Makes a public function of `read`, which makes a Request of its arguments; `explain` takes the request alone.

    foreign_names: arguments of other libraries -> what to give in their place, which a TypeError then says
    """

    @functools.wraps(read)
    def serve(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Any:
        try:
            operator, given, options, backend, returned = read(*args, **kwargs)
        except TypeError as error:
            _advise(error, foreign_names)
            raise
        return returned(operator(given, options, backend))

    serve.foreign_names = foreign_names  # type: ignore[attr-defined]
    return explained_by(read)(serve)


def explained_by(read: Callable[..., Any]) -> Callable[[Callable[Arguments, Any]], Callable[Arguments, Any]]:
    """Has `explain` take the Request that `read` makes of a function's arguments."""

    def mark(function: Callable[Arguments, Any]) -> Callable[Arguments, Any]:
        function.request = read  # type: ignore[attr-defined]
        return function

    return mark


def request_of(function: Any, *args: Any, **kwargs: Any) -> Request:
    """The request that a public function makes of these arguments. Raises ArgumentError for any other function."""
    read = getattr(function, "request", None)
    if read is None:
        raise ArgumentError(f"function={function!r} must be one of fastattention's")
    bound = (function.__self__, *args) if isinstance(function, MethodType) else args
    try:
        return read(*bound, **kwargs)  # type: ignore[no-any-return]
    except TypeError as error:
        _advise(error, getattr(function, "foreign_names", NO_NAMES))
        raise


def _advise(error: TypeError, foreign_names: Mapping[str, str]) -> None:
    """Adds to the message of `error` what to give in place of an argument that other libraries have."""
    for name, advice in foreign_names.items():
        if f"unexpected keyword argument '{name}'" in str(error):
            error.args = (f"{error}; {advice}",)
            return


def forget_plans() -> None:
    """Makes the next calls of every operator choose their backends again."""
    for operator in _operators:
        operator.forget_plans()
