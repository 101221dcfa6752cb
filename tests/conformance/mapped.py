"""What torch.vmap promises of every operator: the results of a loop over the mapped axis, in as few calls as said."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.testing import assert_close

from fastattention.engine.operator import AnyOperator

Results = tuple[Tensor, ...]


def check_mapped(
    operator: AnyOperator,
    function: Callable[..., Results],
    tensors: Mapping[str, Any],
    mapped: Mapping[str, Tensor],
    calls: int = 1,
) -> None:
    """function: takes all tensors by name; mapped: those with the mapped axis, as their first one."""
    size = len(next(iter(mapped.values())))
    alone = [function(**{**tensors, **{name: x[index] for name, x in mapped.items()}}) for index in range(size)]
    with mock.patch.object(operator, "plan", wraps=operator.plan) as plan:
        found = torch.vmap(lambda mapped: function(**{**tensors, **mapped}))(dict(mapped))
    assert plan.call_count == calls
    for result, wanted in zip(found, zip(*alone, strict=True), strict=True):
        assert_close(result, torch.stack(wanted), atol=1e-5, rtol=1e-5)
