"""The kernels that replace the vendor's refuse what the vendor does not define, or give NaN for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ascend.vendor.environment import skip_without_torch_npu

skip_without_torch_npu()

MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def tensors(*tokens: int, heads: int = 2, headdim: int = 16, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(*tokens, heads, headdim, generator=torch.Generator().manual_seed(1)).to(dtype)


def training(**changed: Any) -> tuple[Any, ...]:
    q, k = tensors(5), tensors(7)
    arguments = {"query": q, "key": k, "value": k, "head_num": 2, "input_layout": "TND", "actual_seq_qlen": [2, 5],
                 "actual_seq_kvlen": [3, 7], "sparse_mode": 3, "atten_mask": MASK}  # fmt: skip
    results: tuple[Any, ...] = torch.ops.npu.npu_fusion_attention(**(arguments | changed))
    return results


def inference(**changed: Any) -> tuple[Any, ...]:
    q, k = tensors(2, 3), tensors(2, 5)
    arguments = {"query": q, "key": k, "value": k, "num_heads": 2, "num_key_value_heads": 2, "input_layout": "BSND",
                 "sparse_mode": 3, "atten_mask": MASK, "softmax_lse_flag": True}  # fmt: skip
    results: tuple[Any, ...] = torch.ops.npu.npu_fused_infer_attention_score(**(arguments | changed))
    return results


def gradients(**changed: Any) -> tuple[Any, ...]:
    q, k = tensors(5), tensors(7)
    row_max = torch.zeros(5, 2, 8)
    arguments = {"query": q, "key": k, "value": k, "dy": q, "attention_in": q, "head_num": 2, "input_layout": "TND",
                 "actual_seq_qlen": [2, 5], "actual_seq_kvlen": [3, 7], "sparse_mode": 3, "atten_mask": MASK,
                 "softmax_max": row_max, "softmax_sum": torch.ones_like(row_max), "softmax_layout": "TND",
                 "scale_value": 0.1}  # fmt: skip
    results: tuple[Any, ...] = torch.ops.npu.npu_fusion_attention_grad(**(arguments | changed))
    return results


def test_all_run_what_they_take() -> None:
    assert training()[0].isfinite().all()
    assert inference()[0].isfinite().all()
    assert all(grad.isfinite().all() for grad in gradients()[:3])


@pytest.mark.parametrize(
    "changed",
    [
        {"actual_seq_qlen": [0, 2, 5]},
        {"actual_seq_qlen": [2, 4]},
        {"actual_seq_qlen": None},
        {"actual_seq_qlen": [4, 5]},
        {"atten_mask": ~MASK},
        {"atten_mask": MASK[:5, :7]},
        {"head_num": 4},
        {"softmax_layout": "BSND"},
        {"query": tensors(5, dtype=torch.float32)},
        {"query": tensors(5, 2)[:, 0]},
        {"sparse_mode": 4, "pre_tockens": 1, "next_tockens": -2},
        {"sink": torch.zeros(2, dtype=torch.float16)},
    ],
)
def test_training_refuses_what_is_wrong(changed: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="does not take this"):
        training(**changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"atten_mask": None},
        {"atten_mask": MASK.T.contiguous()},
        {"actual_seq_lengths_kv": [5]},
        {"actual_seq_lengths_kv": [5, 6]},
        {"num_heads": 1},
        {"value": tensors(2, 5, headdim=32)},
        {"key": tensors(2, 5, dtype=torch.bfloat16)},
        {"block_table": torch.zeros(2, 1, dtype=torch.int32), "block_size": 128},
        {"key_antiquant_scale": torch.ones(1, 2, 5)},
        {"query": tensors(2, 1), "inner_precise": 2},
    ],
)
def test_inference_refuses_what_is_wrong(changed: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="does not take this"):
        inference(**changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"actual_seq_qlen": [0, 2, 5]},
        {"actual_seq_qlen": None},
        {"actual_seq_qlen": [4, 5]},
        {"atten_mask": ~MASK},
        {"head_num": 4},
        {"softmax_layout": "BSND"},
        {"softmax_max": torch.zeros(2, 5, 8)},
        {"softmax_sum": torch.ones(5, 2, 1)},
        {"softmax_sum": torch.arange(8.0).expand(5, 2, 8).contiguous()},
        {"softmax_max": torch.full((5, 2, 8), torch.nan)},
        {"attention_in": tensors(5, dtype=torch.float32)},
        {"dy": tensors(5, headdim=32)},
        {"dy": tensors(5, 2)[:, 0]},
        {"value": tensors(7, headdim=8)},
        {"sink": torch.zeros(2, dtype=torch.float16)},
        {"keep_prob": 0.9},
        {"seed": 1},
    ],
)
def test_gradients_refuse_what_is_wrong(changed: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"does not take this|not part of these tests"):
        gradients(**changed)


def test_statistics_of_gradients_lie_heads_first_unless_said() -> None:
    row_max = tensors(5, headdim=1, dtype=torch.float32).repeat(1, 1, 8)
    heads_first = torch.cat([row_max[sequence].transpose(0, 1).reshape(-1, 8) for sequence in (slice(2), slice(2, 5))])
    one = gradients(softmax_max=row_max)
    other = gradients(softmax_max=heads_first.reshape(5, 2, 8), softmax_layout="")
    assert all(torch.equal(grad, same) for grad, same in zip(one[:3], other[:3], strict=True))
    assert not torch.equal(one[0], gradients(softmax_max=row_max, softmax_layout="")[0])


def test_a_mode_without_a_mask_attends_to_everything() -> None:
    assert torch.equal(training(atten_mask=None)[0], training(sparse_mode=0, atten_mask=None)[0])


def test_statistics_lie_heads_first_in_a_sequence_unless_asked() -> None:
    first, asked = training()[1], training(softmax_layout="TND")[1]
    assert first.shape == asked.shape == (5, 2, 8)
    assert not torch.equal(first, asked)
    sequence = first.reshape(-1, 8)[4:].reshape(2, 3, 8)  # heads, queries of the second sequence
    assert torch.equal(sequence.transpose(0, 1), asked[2:])


def test_rows_without_keys_are_spoilt_or_corrected() -> None:
    k = tensors(2, 2)
    for precise, out, lse in ((0, 1e4, 1e4), (2, 0.0, torch.inf)):
        results = inference(key=k, value=k, inner_precise=precise)
        assert (results[0][:, 0] == out).all()
        assert (results[1][:, :, 0] == lse).all()
        assert results[0][:, 1:].abs().max() < 10
