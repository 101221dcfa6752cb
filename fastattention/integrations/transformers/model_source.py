"""Inspects the code of a model: how it dispatches attention, and whether it computes with its mask.

Transformers has a modeling module for every configuration. Its classes are inspected once per model.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from fastattention.errors import UnsupportedError

MASK = "attention_mask"  # the name of a mask in every attention module of Transformers
# Attributes and methods of a mask that may be used without computing with it.
_ASKED = ("shape", "ndim", "dtype", "device", "dim", "size")

Found = TypeVar("Found")


def once_for_each_class(inspect_class: Callable[[type], Found]) -> Callable[[object | None], Found]:
    """Makes a function of configurations of one of their classes, which it calls once for each that does not raise.

    torch.compile takes the result as a constant.
    """
    constant = torch.compiler.assume_constant_result(inspect_class)  # type: ignore[no-untyped-call]
    found: dict[type, Found] = {}

    @functools.wraps(inspect_class)
    def of_configuration(config: object | None) -> Found:
        if type(config) not in found:
            found[type(config)] = constant(type(config))
        return found[type(config)]

    return of_configuration


@once_for_each_class
def require_dispatch(config_class: type) -> None:
    """Raises UnsupportedError when the model of this configuration computes its attention by itself.

    Such a model would let fast_attention make its mask, and then add a bool tensor to its scores.
    """
    modeling = modeling_of(config_class)
    if modeling is None or hasattr(modeling, "ALL_ATTENTION_FUNCTIONS"):
        return
    for name, member in vars(modeling).items():
        if "Attention" in name and isinstance(member, type) and issubclass(member, nn.Module):
            raise UnsupportedError(
                f"{modeling.__name__}.{name} computes attention by itself instead of asking Transformers' "
                "AttentionInterface, which fast_attention cannot change; load it with attn_implementation='eager'"
            )


@once_for_each_class
def matrix_needed(config_class: type) -> str | None:
    """The matrix that the code of this model needs as a mask: None, "bool" for that of SDPA, "float" for that of eager.

    A matrix is needed where the code changes a mask before it hands it to the attention function, as models with an
    indexer do, or says that it needs one. DeepSeek-V4 appends a bias to it, and has no SDPA, so its mask must be one
    that is added to scores.
    """
    modeling = modeling_of(config_class)
    if modeling is None:
        return None
    try:
        tree = ast.parse(inspect.getsource(modeling))
    except (OSError, SyntaxError):  # a module without source
        return None
    computes = any(
        is_computation(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and asks_interface(function)
        for node in ast.walk(function)
    )
    if not computes and not any(map(_forbids_to_skip, ast.walk(tree))):
        return None
    members = [member for member in vars(modeling).values() if isinstance(member, type)]
    sdpa = any(member._supports_sdpa for member in members if issubclass(member, PreTrainedModel))
    return "bool" if sdpa else "float"


def _forbids_to_skip(node: ast.AST) -> bool:
    """Whether the code asks for a mask that must be a matrix: Doge and T5Gemma 2 compute with it elsewhere."""
    if not isinstance(node, ast.keyword) or node.arg not in ("allow_is_causal_skip", "allow_is_bidirectional_skip"):
        return False
    return isinstance(node.value, ast.Constant) and node.value.value is False


def asks_interface(function: ast.FunctionDef) -> bool:
    """Whether a function looks up the attention function of its implementation."""
    return any(isinstance(node, ast.Name) and node.id == "ALL_ATTENTION_FUNCTIONS" for node in ast.walk(function))


def is_computation(node: ast.AST) -> bool:
    """Whether `node` is an operator, an index, a method or a function of torch that is given the mask."""
    if isinstance(node, ast.BinOp):
        return _is_mask(node.left) or _is_mask(node.right)
    if isinstance(node, ast.UnaryOp):
        return not isinstance(node.op, ast.Not) and _is_mask(node.operand)
    if isinstance(node, ast.Attribute):
        return _is_mask(node.value) and node.attr not in _ASKED
    if isinstance(node, ast.Subscript):
        return _is_mask(node.value)
    if isinstance(node, ast.Call):
        of_torch = ast.unparse(node.func).split(".")[0] in ("torch", "nn", "F")
        listed = [item for given in node.args for item in (given.elts if isinstance(given, ast.List) else [given])]
        return of_torch and any(map(_is_mask, listed))
    return False


def _is_mask(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == MASK


def modeling_of(config_class: type) -> ModuleType | None:
    """The module of the model with this configuration, if it has been imported."""
    return sys.modules.get(_modeling_name(config_class))


def modules_of(config_class: type) -> list[Any]:
    """The classes of torch modules in `modeling_of`."""
    members = [] if (modeling := modeling_of(config_class)) is None else list(vars(modeling).values())
    return [member for member in members if isinstance(member, type) and issubclass(member, nn.Module)]


def import_modeling(config_class: type) -> None:
    """Imports the module of the model with this configuration, which Transformers does when a model is made."""
    name = _modeling_name(config_class)
    if name.startswith("transformers."):
        importlib.import_module(name)


def _modeling_name(config_class: type) -> str:
    package, _, module = config_class.__module__.rpartition(".")
    return f"{package}.{module.replace('configuration_', 'modeling_', 1)}"


def refuse_tables(name: str, prepare: Callable[[object], object] = lambda config: None) -> None:
    """Makes models that look implementations up in a table of their own refuse `name` from now on.

    prepare: called with the configuration of each model that is to have this implementation, before its first pass

    Such tables (falcon, gpt_neo, sam and others) have only "eager", "sdpa" and flash-attn, and any other name would be
    a KeyError. Transformers asks every model for its implementation before its layers are made, and layers look into
    the table. The function that it asks is wrapped here: it puts a refusal into the tables of that model.
    """
    ask = PreTrainedModel.get_correct_attn_implementation
    if getattr(ask, "refused", None) is None:
        ask = _with_refusals(ask, {})
        PreTrainedModel.get_correct_attn_implementation = ask  # type: ignore[method-assign]
    ask.refused[name] = prepare  # type: ignore[attr-defined]


def _with_refusals(ask: Callable[..., str], refused: dict[str, Callable[[object], object]]) -> Any:
    @functools.wraps(ask)
    def get_correct_attn_implementation(self: PreTrainedModel, *args: Any, **kwargs: Any) -> str:
        try:
            implementation = ask(self, *args, **kwargs)
        except ValueError as error:  # Transformers lists its own names only
            if "attn_implementation=" in str(error) and "is not supported" in str(error):
                named = ", ".join(f'`attn_implementation="{name}"`' for name in sorted(refused))
                error.args = (f"{error} fastattention is {named}.",)
            raise
        if implementation in refused:
            refused[implementation](getattr(self, "config", None))
            for table in _tables(type(self)):
                refusal = table.setdefault(implementation, _Refusal(implementation, {}))
                if isinstance(refusal, _Refusal):  # other entries are a user's own
                    refusal.models[type(getattr(self, "config", None))] = type(self).__name__
        return implementation

    get_correct_attn_implementation.refused = refused  # type: ignore[attr-defined]
    return get_correct_attn_implementation


def _tables(model_class: type) -> Iterator[dict[str, Any]]:
    """The tables from implementations to attention modules in the modules of a class and its bases."""
    for name in {one.__module__ for one in model_class.__mro__}:
        for member in vars(sys.modules.get(name, object)).values():
            if (
                isinstance(member, dict)
                and isinstance(each := member.get("eager"), type)
                and issubclass(each, nn.Module)
            ):
                yield member


class _Refusal(NamedTuple):
    """An entry of a table: the attention module of an implementation that the model cannot have."""

    implementation: str
    models: dict[type, str]  # names of the models that asked last, by the class of their configuration

    def __call__(self, config: object, *_: Any, **__: Any) -> NoReturn:
        model = self.models.get(type(config)) or next(reversed(self.models.values()))
        raise UnsupportedError(
            f"{model} chooses its attention from a table of its own instead of asking Transformers' "
            f"AttentionInterface, so {self.implementation} cannot serve it; load it with attn_implementation='eager', "
            "or give a dict as attn_implementation that says so for this part of the model"
        )
