"""How weight gradients are cut into slices, and which block of threads computes which slice."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import thinning

from swjax.kernels.block_weight_gradients.mosaic_gpu import WRITE_TOKENS as BLOCK_WRITE_TOKENS
from swjax.kernels.mosaic_gpu.slices import Part, Schedule, Slices, best_slices
from swjax.kernels.weight_gradients.mosaic_gpu import WRITE_TOKENS

BLOCKS = 132  # multiprocessors of an H200


def slices_of(tile_count, tokens, *, largest=16, write_tokens=WRITE_TOKENS):
    return best_slices(tile_count, tokens, BLOCKS, largest=largest, write_tokens=write_tokens)


def parts_of(tile_count, slices, *, steps, block_count=BLOCKS):
    """Returns for each block of threads the list of its `Part`s, of integers."""
    schedule = Schedule(tile_count, block_count, steps, slices)
    most = tile_count // block_count + 1 + slices.late * block_count

    @jax.jit
    def plan(block):
        parts = jax.vmap(lambda i: schedule.part(block, i))(jnp.arange(most))
        return schedule.part_count(block), jnp.stack(parts, axis=-1)

    counts, rows = map(np.asarray, jax.vmap(plan)(jnp.arange(block_count)))
    return [[Part(*part) for part in row[:count].tolist()] for count, row in zip(counts, rows)]


CASES = [(50, 514), (200, 514), (200, 1024), (150, 514), (132, 64), (264, 64), (131, 80), (7, 300)]


@pytest.mark.parametrize("tile_count, steps", [*CASES, (263, 16), (263, 1), (200, 7), (50, 1)])
def test_slices_cover_every_tile_once_and_in_order(tile_count, steps):
    slices = slices_of(tile_count, 64 * steps, largest=steps // 8)
    assert_covered(parts_of(tile_count, slices, steps=steps), tile_count, steps)


@pytest.mark.parametrize(
    "tiles_and_steps, block_count",
    thinning.thinned(list(itertools.product([1, 3, 9, 13], [1, 3, 40])), [1, 2, 7], full=[]),
)
def test_slices_of_few_blocks_cover_every_tile(tiles_and_steps, block_count):
    tile_count, steps = tiles_and_steps
    slices = best_slices(tile_count, 64 * steps, block_count, largest=steps, write_tokens=600)
    blocks = parts_of(tile_count, slices, steps=steps, block_count=block_count)
    assert_covered(blocks, tile_count, steps)


def assert_covered(blocks, tile_count, steps):
    found = {}
    for part in itertools.chain(*blocks):
        found.setdefault(part.tile, []).append(part)
    assert sorted(found) == list(range(tile_count))
    for parts in found.values():
        _, numbers, starts, stops = zip(*sorted(parts))
        assert numbers == tuple(range(len(parts)))
        assert (starts[0], stops[-1]) == (0, steps)
        assert starts[1:] == stops[:-1] and all(np.less(starts, stops))


@pytest.mark.parametrize("tile_count, steps", CASES)
def test_no_slice_waits_forever(tile_count, steps):
    """A slice is added after the slice before it; blocks compute their parts in order."""
    blocks = parts_of(tile_count, slices_of(tile_count, 64 * steps), steps=steps)
    written, progress = dict.fromkeys(range(tile_count), 0), True
    while progress:
        progress = False
        for block in blocks:
            while block and written[block[0].tile] == block[0].slice:
                written[block.pop(0).tile] += 1
                progress = True
    assert not any(blocks)


# load: a bound of the rounds of the busiest block. Equal shares would take tile_count / 132 rounds.
@pytest.mark.parametrize(
    "tile_count, late, load",
    [(200, 5, 1.55), (50, 5, 0.405), (150, 6, 1.15), (132, 0, 1), (264, 0, 2), (131, 1, 1)],
)
def test_slices_fill_the_last_round(tile_count, late, load):
    slices = slices_of(tile_count, 65_536)
    assert slices.late == late
    blocks = parts_of(tile_count, slices, steps=1024)
    assert max(sum(part.stop - part.start for part in block) for block in blocks) <= load * 1024


# best: the best of 1 to 8 slices on an H200, within 2%.
@pytest.mark.parametrize(
    "tile_count, tokens, best", [(80, 65_536, 3), (80, 32_896, 3), (56, 65_536, 7)]
)
def test_slices_in_int8_are_those_measured(tile_count, tokens, best):
    found = slices_of(tile_count, tokens, largest=8, write_tokens=BLOCK_WRITE_TOKENS)
    assert found == (0, 0, best)


@pytest.mark.parametrize("largest", [0, 1])
def test_short_sums_are_not_cut(largest):
    assert slices_of(50, 512, largest=largest) == (0, 0, 1)


@pytest.mark.parametrize(
    "slices, message",
    [
        (Slices(100, 0.5, 2), "whole must be a multiple of the 132 blocks"),
        (Slices(264, 0.0, 1), "at most 200, the number of tiles; got 264"),
        (Slices(132, 0.5, 0), "late must be 1 to 8, the number of steps; got 0"),
        (Slices(132, 0.0, 9), "late must be 1 to 8, the number of steps; got 9"),
        (Slices(0, 0.5, 2), "early slices need fewer cut tiles than blocks; got 200 cut tiles"),
    ],
)
def test_slices_that_miss_a_tile_are_refused(slices, message):
    with pytest.raises(ValueError, match=message):
        Schedule(200, BLOCKS, 8, slices)
