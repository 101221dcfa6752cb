"""Cases that every decode kernel of some GPU serves, beside the list of cases."""

from __future__ import annotations

from typing import Any

from conformance.case import KvCacheCase

# Kernels are compiled apart for modified scores, for pages, and for what caches hold.
_FORMS: dict[str, dict[str, Any]] = {
    "": {},
    "-softcap": {"softcap": 5.0},
    "-pages": {"page_block_size": 16},
    "-int8": {"stored": "int8"},
    "-float8": {"stored": "float8"},
}

# They are chosen by head dimension and by how many query rows share a key head: rows that do not fill their tile.
DECODE_TILES = [
    KvCacheCase(name=f"decode-tiles-{d}-{q * group}{name}", seqlen_q=q, cache_seqlens=(83, 150), nheads=group, nheads_k=1,
                headdim=d, causal=True, **form)
    for d in (32, 64, 96, 128, 192, 256)
    for q, group in ((1, 7), (5, 5), (9, 5), (30, 3))
    for name, form in _FORMS.items()
]  # fmt: skip

# And by the number of keys, which is the room that caches have.
MANY_KEYS = [
    KvCacheCase(name=f"many-keys-{d}{name}", cache_seqlens=(83, 150), spare=13_000, nheads=7, nheads_k=1, headdim=d,
                **form)
    for d in (32, 64, 96, 128)
    for name, form in _FORMS.items()
]  # fmt: skip


def is_plain(case: KvCacheCase) -> bool:
    """Whether its kernel is compiled for nothing in particular."""
    return case.softcap == 0.0 and case.page_block_size is None and case.stored == "as_q"
