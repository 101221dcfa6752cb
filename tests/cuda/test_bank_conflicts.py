"""The main loop of the kernels has no bank conflicts, by the emulator's count."""

from __future__ import annotations

import emulator
import pytest
import torch
from emulator import EmulatedCudaBackend, Wavefronts

from fastattention.validation import Options, prepare_dense

KINDS = ("loads", "stores", "matrices", "copies")


def wavefronts(backend: EmulatedCudaBackend, headdim: int, seqlen_q: int, seqlen_k: int) -> dict[str, Wavefronts]:
    """Of a call whose tiles are all full."""
    q = torch.randn(1, seqlen_q, 1, headdim, dtype=torch.float16)
    k = torch.randn(1, seqlen_k, 1, headdim, dtype=torch.float16)
    backend.forward(*prepare_dense(q, k, k, options=Options()))
    return {kind: getattr(backend.report, kind) for kind in KINDS}


def assert_main_loop_has_no_conflicts(backend: EmulatedCudaBackend, headdim: int, seqlen_q: int) -> None:
    """What 64 more keys take, which is nothing but the main loop."""
    less, more = (wavefronts(backend, headdim, seqlen_q, seqlen_k) for seqlen_k in (192, 256))
    counted = {kind: more[kind].counted - less[kind].counted for kind in KINDS}
    ideal = {kind: more[kind].ideal - less[kind].ideal for kind in KINDS}
    assert counted == ideal
    assert counted["loads"] + counted["matrices"] > 0
    assert counted["stores"] + counted["copies"] > 0


@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("backend", [emulator.EmulatedSm70(), emulator.EmulatedSm75(), emulator.EmulatedSm80()],
                         ids=["sm70", "sm75", "sm80"])  # fmt: skip
def test_main_loop_has_no_bank_conflicts(backend: EmulatedCudaBackend, headdim: int) -> None:
    assert_main_loop_has_no_conflicts(backend, headdim, 128)


@pytest.mark.parametrize(("headdim", "seqlen_q"), [(64, 64), (128, 64), (128, 256), (256, 64), (256, 128)])
def test_nor_has_it_with_volta_s_other_tiles(headdim: int, seqlen_q: int) -> None:
    assert_main_loop_has_no_conflicts(emulator.EmulatedSm70(), headdim, seqlen_q)
