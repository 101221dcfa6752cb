"""A coarse estimate of the time of a row block, cheap enough to compare many tilings."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from fastattention.backends.ascend.simulator.core import CubeUnit, Setting, VectorUnit

LATER = 1e9  # cycles: a stage that begins then finds in its buffers what can be loaded ahead


@dataclass(frozen=True)
class StageCycles:
    """Of each stage of a tile by itself, with what it needs at hand."""

    scores: float
    softmax: float
    masked_softmax: float
    products: float
    update: float
    result: float
    loads: float  # queries and the first keys
    weights: float  # the first of a tile's weights into L1
    cube_loads: float  # all that the Cube loads for a tile


@functools.lru_cache(maxsize=4096)
def stage_cycles(setting: Setting) -> StageCycles:
    """Each stage simulated once."""
    cube = CubeUnit(setting, [])
    queries = cube.load_queries()
    loaded, _ = cube.scores(0, 0.0)
    _, scores = CubeUnit(setting, []).scores(0, LATER)
    *_, products = CubeUnit(setting, []).products(0, LATER, 0.0)
    late = CubeUnit(setting, [])
    first_weights, *_ = late.products(0, 0.0, LATER)
    _, softmax = VectorUnit("Vector", setting, []).softmax(0, False, 0.0, 0.0)
    _, masked = VectorUnit("Vector", setting, []).softmax(0, True, 0.0, 0.0)
    _, update = VectorUnit("Vector", setting, []).update(0, 0.0)
    result = VectorUnit("Vector", setting, []).finish(0)
    return StageCycles(
        scores=scores - LATER,
        softmax=softmax,
        masked_softmax=masked,
        products=products - LATER,
        update=update,
        result=result,
        loads=max(loaded, queries),
        weights=first_weights - LATER,
        cube_loads=cube.load.busy - queries + late.load.busy,
    )


def row_block_estimate(setting: Setting, num_tiles: int, num_masked: int) -> float:
    """Cycles of so many tiles, to the last of which a mask is applied.

    A tile takes what the busier unit takes, or what its loads take; or, with few tiles under way, a share of the way
    through all its stages.
    """
    ahead = min(setting.tiling.preload, num_tiles)
    stages = stage_cycles(replace(setting, tiling=replace(setting.tiling, preload=1)))  # stages do not depend on it
    handover = setting.costs.handover
    cube = stages.scores + stages.products + handover
    # Everything between the end of a tile's scores and the start of its product.
    between = stages.softmax + 2 * handover + stages.weights
    cycles = setting.costs.dispatch + stages.loads + stages.update + stages.result + handover
    more = (stages.masked_softmax - stages.softmax) * num_masked
    if ahead == 1:
        return cycles + num_tiles * max(cube + between, stages.cube_loads) + more
    vector = stages.softmax + stages.update
    pace = max(cube, vector, stages.cube_loads, (cube + between) / ahead)
    hidden = (ahead - 1) * stages.scores  # of the first softmax
    slack = (pace - vector) * num_masked
    return cycles + num_tiles * pace + max(between - hidden, 0.0) + max(more - slack, 0.0)
