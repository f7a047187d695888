"""However a run is interrupted and split over processes, an epoch yields every readable example once."""

import itertools
import json

import numpy as np
import pytest
import thinning
from photographs import write_tars

from swjax import data
from swjax.data.order import ShardShuffle, order
from swjax.data.progress import Position


class Pairs:
    """Images of one colour, which encodes their index; those in `bad` cannot be read."""

    class_names, templates, attribution, photographs = (), (), "", True

    def __init__(self, count, bad=(), shards=None):
        self._count, self._bad = count, frozenset(bad)
        self.shards = shards

    def __len__(self):
        return self._count

    def key(self, index):
        return f"pair {index}"

    def __getitem__(self, index):
        if index in self._bad:
            raise OSError(f"{index} is gone")
        image = np.full((9, 9, 3), index % 256, np.uint8)
        return {"image": image, "label": index, "captions": self.captions(index)}

    def captions(self, label):
        return (f"number {label}",)


OPTIONS = {"seed": 3, "context_length": 6, "image_size": 8, "max_bad_share": 1.0}


class Run:
    """The loaders of all processes of a run, in this process; `cut` returns the position to resume from."""

    def __init__(self, source, processes, batch_size, position=None, **options):
        self.loaders = [
            data.loader(
                source, batch_size=batch_size, position=position,
                process_index=rank, process_count=processes, **OPTIONS | options,
            )
            for rank in range(processes)
        ]  # fmt: skip

    def steps(self, count):
        """Takes one batch a step from each process; returns the indices of each step, process by process."""
        return [
            np.concatenate([next(loader)["index"] for loader in self.loaders]).tolist()
            for _ in range(count)
        ]

    def cut(self):
        """Closes the loaders; returns their common position as a checkpoint stores it."""
        own = []
        for loader in self.loaders:
            with pytest.raises(ValueError, match="needs the counts of all; gather returned 0"):
                loader.position(lambda counts: own.append(counts) or np.empty((0, 3)))
        positions = [json.dumps(loader.position(lambda _: own)) for loader in self.loaders]
        for loader in self.loaders:
            loader.close()
        assert len(set(positions)) == 1  # all processes save the same
        return json.loads(positions[0])


def flat(steps):
    return list(itertools.chain.from_iterable(steps))


SHUFFLES = [{"shuffle": "global"}, {"shuffle": "shard", "shuffle_shards": 3}]


@pytest.mark.parametrize("options", SHUFFLES)
@pytest.mark.parametrize("cut", [1, 7, 11])
def test_cut_anywhere_is_the_same_run(options, cut):
    source = Pairs(50, bad=range(0, 50, 7), shards=np.array([20, 5, 9, 16]))
    whole = Run(source, 2, 3, **options).steps(20)
    first = Run(source, 2, 3, **options)
    start = first.steps(cut)
    rest = Run(source, 2, 3, first.cut(), **options).steps(20 - cut)
    assert start + rest == whole


@pytest.mark.parametrize("options", SHUFFLES)
def test_other_numbers_of_processes_lose_and_repeat_nothing(options):
    """Three epochs with 4, 3, 5, 2 and 1 processes; bad examples make some processes read ahead of others."""
    bad = {0, 1, 2, 3, 17, 30, 31, 58}
    source = Pairs(60, bad, shards=np.array([13, 7, 20, 20]))
    seen, position = [], None
    for processes, batch_size, steps in (
        (4, 1, 9),
        (3, 2, 5),
        (3, 2, 2),
        (5, 1, 4),
        (2, 8, 2),
        (1, 3, 99),
    ):
        run = Run(source, processes, batch_size, position, **options)
        seen += flat(run.steps(steps))
        position = run.cut()
    good = 60 - len(bad)
    counts = np.bincount(seen, minlength=60)
    assert not counts[list(bad)].any()
    epochs, rest = divmod(len(seen), good)
    assert epochs >= 3 and set(np.delete(counts, list(bad))) == {epochs} | (
        {epochs + 1} if rest else set()
    )
    assert sum(position["read"]) == len(seen) + sum(position["skipped"])
    whole = Run(source, 1, 1, **options).steps(len(seen))
    assert sorted(flat(whole)) == sorted(seen)  # the same examples as one process reads


def test_pixels_and_captions_do_not_depend_on_processes(tmp_path):
    pattern = write_tars(tmp_path, [9])
    source = data.source("webdataset", pattern, data_dir=str(tmp_path / "data"))
    batches = {
        processes: [
            data.loader(source, batch_size=6 // processes, process_index=rank,
                        process_count=processes, **OPTIONS)
            for rank in range(processes)
        ]
        for processes in (1, 3)
    }  # fmt: skip
    for _ in range(4):
        one, three = ([next(loader) for loader in batches[n]] for n in (1, 3))
        for name in one[0]:
            joined = np.stack([batch[name] for batch in three], axis=1)
            np.testing.assert_array_equal(joined.reshape(one[0][name].shape), one[0][name])


@pytest.mark.parametrize("workers", thinning.first([2, 0]))
def test_workers_change_nothing(workers, tmp_path):
    def spoil(number, files):
        return files | ({"jpg": b"no image"} if number % 5 == 0 else {})

    pattern = write_tars(tmp_path, [12, 12], spoil)
    source = data.source("webdataset", pattern, data_dir=str(tmp_path / "data"))
    steps = Run(source, 1, 4).steps(8)
    run = Run(source, 1, 4, workers=workers)
    assert run.steps(5) == steps[:5]
    position = run.cut()
    assert position["skipped"][0] > 0
    assert Run(source, 1, 4, position, workers=2 - workers).steps(3) == steps[5:]


def test_more_examples_a_batch_than_are_loaded_at_once():
    source = Pairs(700, bad=[5, 6, 400])
    run = Run(source, 1, 300)
    seen = flat(run.steps(2))
    assert len(set(seen)) == len(seen) == 600
    more = flat(Run(source, 1, 97, run.cut()).steps(1))
    assert sorted(seen + more) == sorted(set(range(700)) - {5, 6, 400})


def test_positions_of_processes_that_drifted_apart():
    """The position agrees with a simple model that lists all remaining examples."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        position, remaining = Position(), list(range(400))
        for _ in range(rng.integers(1, 5)):
            taken = rng.integers(0, 12, rng.integers(1, 6)).tolist()
            done = {p + j * len(taken) for p, n in enumerate(taken) for j in range(n)}
            remaining = [x for turn, x in enumerate(remaining) if turn not in done]
            position = position.after(taken)
            assert [position.of(turn) for turn in range(40)] == remaining[:40]


def test_a_position_of_other_data_is_refused():
    position = Run(Pairs(20), 1, 2).cut()
    with pytest.raises(ValueError, match="has 21 examples; when this run was saved, it had 20"):
        Run(Pairs(21), 1, 2, position)


# Order


def test_shard_shuffle_is_a_permutation_that_opens_few_files():
    lengths = np.array([5, 0, 17, 3, 9, 9, 1, 30, 12, 4])
    shard_of = np.repeat(np.arange(10), lengths)
    shuffled = ShardShuffle(lengths, seed=5, shards=4)
    epochs = [[shuffled[i] for i in range(e * 90, (e + 1) * 90)] for e in range(3)]
    assert all(sorted(epoch) == list(range(90)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    for epoch in epochs:
        files = [shard_of[i] for i in epoch]
        lifetimes = [(files.index(f), 90 - files[::-1].index(f)) for f in set(files)]
        assert max(sum(a <= at < b for a, b in lifetimes) for at in range(90)) <= 4
    assert ShardShuffle(lengths, seed=5, shards=4)[77] == epochs[0][77]
    assert [ShardShuffle(lengths, seed=6, shards=4)[i] for i in range(90)] != epochs[0]


def test_processes_read_different_files():
    lengths = np.full(32, 10)
    shuffled = ShardShuffle(lengths, seed=0, shards=8)
    read = [{shuffled[i] // 10 for i in range(rank, 320, 4)} for rank in range(4)]
    assert [len(files) for files in read] == [8] * 4 and len(set.union(*read)) == 32


def test_parts_of_a_mixture_come_by_weight_and_in_epochs_of_their_own(tmp_path):
    few, many = Pairs(10), Pairs(100, shards=np.full(10, 10))
    mixture = data.Mixture({"few": (few, 1.0), "many": (many, 3.0)})
    for options in SHUFFLES:
        seen = np.array(flat(Run(mixture, 2, 4, **options).steps(25)))
        of_few, of_many = seen[seen < 10], seen[seen >= 10]
        assert len(of_few) == 50 and len(of_many) == 150
        assert (np.bincount(of_few) == 5).all()
        counts = np.bincount(of_many - 10, minlength=100)
        assert set(counts.tolist()) == {1, 2}
        window = seen.reshape(-1, 8) < 10  # two of eight in every batch
        assert set(window.sum(axis=1).tolist()) == {2}


def test_seeds_differ_between_the_parts_of_a_mixture():
    mixture = data.Mixture({"a": (Pairs(50), 1.0), "b": (Pairs(50), 1.0)})
    drawn = order(mixture, seed=0)
    first = [drawn[i] for i in range(100)]
    a, b = ([i % 50 for i in first if (i < 50) == which] for which in (True, False))
    assert sorted(a) == sorted(b) and a != b


@pytest.mark.parametrize(
    "options, message",
    [
        ({"shuffle": "none"}, "shuffle must be one of global, shard"),
        ({"shuffle_shards": 0}, "shuffle_shards positive; they are 'global' and 0"),
        ({"on_bad": "cry"}, "one of skip, stop .* they are 'cry' and 1.0"),
        ({"max_bad_share": 1.5}, r"must be in \[0, 1\]; they are 'skip' and 1.5"),
        ({"start_step": 1, "position": {"batches": 1}}, "and there is a position"),
    ],
)
def test_loader_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        data.loader(Pairs(20), batch_size=2, **OPTIONS | options)
