"""The device npu without an NPU: its memory is the host's, and the CPU computes its operators.

torch_npu itself allocates tensors and makes views of them, by the functions of acl_stub.c. Every other operator that it
registers is replaced: the new one looks at the same memory as tensors of the CPU, calls torch there, and copies the
results. For an operator that it lacks, torch_npu warns and computes on copies. So checks of devices, masks made on the
device and waits for it are real. The vendor's arithmetic and speed are not.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

# Operators that allocate or describe memory: torch_npu runs them without computing.
_KEPT = {"empty", "empty_strided", "empty_like", "new_empty_strided", "resize_", "resize_as_", "set_", "record_stream",
         "is_pinned", "is_set_to", "_pin_memory", "_copy_from_and_resize", "as_strided", "view", "_reshape_alias",
         "squeeze", "unsqueeze", "unfold", "view_as_real", "view_as_complex"}  # fmt: skip
_OF_THE_VENDOR = {"npu_fusion_attention", "npu_fusion_attention_grad", "npu_fused_infer_attention_score",
                  "npu_lightning_indexer", "npu_sparse_flash_attention"}  # fmt: skip
# Only the device knows how long their results are.
_SIZED_BY_NUMBERS = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}

waits: Counter[str] = Counter()  # operators whose results the host had to wait for
float64: Counter[str] = Counter()  # operators that computed in float64, which an NPU's Cube and Vector units lack

_libraries: list[torch.library.Library] = []  # they unregister when they are collected


@functools.cache
def install() -> None:
    """Replaces the operators in this process. torch_npu must have been imported, by environment.py."""
    own = {"contiguous": _contiguous, "matmul_backward": _matmul_backward, "scaled_dot_product_attention": _sdpa}
    libraries = {space: torch.library.Library(space, "IMPL") for space in ("aten", "npu")}
    _libraries.extend(libraries.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators that are replaced
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
            space, _, rest = name.partition("::")
            base, _, overload = rest.partition(".")
            if space not in libraries or base in _KEPT or (space == "npu" and base not in _OF_THE_VENDOR):
                continue
            operator = getattr(getattr(getattr(torch.ops, space), base, None), overload or "default", None)
            if operator is not None:  # torch_npu also names some that are not declared
                function = own.get(base) or functools.partial(_call, operator)
                libraries[space].impl(rest, function, "PrivateUse1", allow_override=True)
        # torch_npu's goes from autograd to CANN without another operator.
        libraries["aten"].impl("scaled_dot_product_attention", _sdpa, "AutogradPrivateUse1", allow_override=True)


def on_host(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of the CPU."""
    stored = tensor.untyped_storage()
    if stored.nbytes() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    storage: Any = torch._C._construct_storage_from_data_pointer(
        stored.data_ptr(), torch.device("cpu"), stored.nbytes()
    )
    same = torch.empty(0, dtype=tensor.dtype)
    return same.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _call(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The result of `operator` for tensors on npu."""
    _check_devices(operator, args)
    schema = operator._schema
    outs = [each.name for each in schema.arguments if each.kwarg_only and each.alias_info is not None]
    sized = {name: torch.empty(0, dtype=kwargs[name].dtype) for name in outs}  # by the operator
    results = operator(*_here(args), **{name: _here(value) for name, value in kwargs.items()} | sized)
    for name, result in sized.items():
        on_host(kwargs[name].resize_(result.shape)).copy_(result)
    to_host = "device" in kwargs and torch.device(kwargs["device"] or "npu").type == "cpu"
    _note(operator, args, results, to_host)
    single = len(schema.returns) == 1
    returned = []
    for each, result in zip(schema.returns, [results] if single else results or [], strict=True):
        if each.alias_info is not None:
            returned.append(_written(operator, each.alias_info, args, kwargs))
        else:
            returned.append(result if to_host else _there(result))
    return returned[0] if single else tuple(returned) or None


def _check_devices(operator: OpOverload, args: tuple[Any, ...]) -> None:
    """Raises for tensors of the CPU that an NPU would not take. It takes tensors without axes, and indices."""
    name = operator._schema.name.partition("::")[2]
    if name in ("copy_", "_to_copy", "_foreach_copy_") or name.startswith(("index", "_index")):
        return
    flat = [each for arg in args for each in (arg if isinstance(arg, list | tuple) else [arg])]
    strangers = [each for each in flat if isinstance(each, Tensor) and each.dim() and each.device.type != "npu"]
    if strangers:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, got {strangers[0].device}")


def _written(operator: OpOverload, alias: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument that an operator writes and returns."""
    for place, each in enumerate(operator._schema.arguments):
        if each.alias_info is not None and each.alias_info.before_set == alias.before_set:
            return args[place] if place < len(args) else kwargs[each.name]
    raise AssertionError(f"{operator} returns what it was not given")


def _note(operator: OpOverload, args: tuple[Any, ...], results: Any, to_host: bool) -> None:
    name = operator._schema.name.partition("::")[2]
    copies_down = to_host or (name == "copy_" and args[0].device.type == "cpu")
    by_bools = name == "index" and any(each is not None and each.dtype is torch.bool for each in args[1])
    if copies_down or by_bools or name in _SIZED_BY_NUMBERS or isinstance(results, bool | int | float):
        waits[name] += 1
    if any(isinstance(each, Tensor) and each.dtype is torch.float64 for each in (*args, results)):
        float64[name] += 1


def _here(value: Any) -> Any:
    """Arguments as the CPU takes them."""
    if isinstance(value, Tensor):
        return on_host(value) if value.device.type == "npu" else value
    if isinstance(value, list | tuple):
        return type(value)(_here(each) for each in value)
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _there(value: Any) -> Any:
    """Results as the device gives them."""
    if isinstance(value, Tensor):
        result = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="npu")
        on_host(result).copy_(value)
        return result
    return [_there(each) for each in value] if isinstance(value, list | tuple) else value


def _contiguous(tensor: Tensor, *, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    return tensor if tensor.is_contiguous(memory_format=memory_format) else tensor.clone(memory_format=memory_format)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    out, _ = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )
    result: Tensor = out
    return result


def _matmul_backward(grad: Tensor, a: Tensor, b: Tensor, mask: list[bool]) -> tuple[Tensor | None, Tensor | None]:
    """The CPU lacks it. a and b have two dimensions or more."""
    return (
        (grad @ b.mT).sum_to_size(a.shape) if mask[0] else None,
        (a.mT @ grad).sum_to_size(b.shape) if mask[1] else None,
    )
