"""Images on the disk: the order in which they come, the window through which they are seen, and what can go wrong."""

from __future__ import annotations

import json
import multiprocessing
import resource
import shutil
import threading
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import safetensors.torch
import torch
from pictures import make_tree
from test_folders_of_images import drop_times
from torch import Tensor

from equipoise import (
    DDE,
    LUCIR,
    SSIL,
    Balanced,
    BalancedFinetuning,
    Finetune,
    ILBaseline,
    Learner,
    Meta,
    Method,
    Mnemonics,
    Recipe,
    ResizedCrop,
    Step,
)
from equipoise.cli import run_command
from equipoise.data import folders, packing, shards, stored
from equipoise.data.datasets import load
from equipoise.data.images import Images, measure_channels
from equipoise.data.index import COLUMNS, Index, name_shard
from equipoise.data.listing import list_folder
from equipoise.data.packing import Packing, pack
from equipoise.data.ragged import Ragged
from equipoise.data.randomness import generator
from equipoise.data.shards import Shards, open_shards
from equipoise.data.stored import Stored, shuffle_blocks
from equipoise.engine import feed, predict, train
from equipoise.engine.feed import Feed
from equipoise.errors import DataError, RunError, UsageError
from equipoise.learner.step import embed
from equipoise.report.words import describe_changes
from equipoise.runs.plan import Prepared, prepare
from equipoise.runs.resume import Attempt
from equipoise.runs.run import run
from equipoise.runs.settings import Data, Machine, Options, Protocol, Run

SIDE = 12
CROP = ResizedCrop(SIDE)
CPU = Machine("cpu", "fp32")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five classes of twelve images each, in shards of seven: 90 kB."""
    root = tmp_path_factory.mktemp("feed")
    make_tree(root / "data", classes=5, train=12, test=3, width=27, height=21)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "IMAGES", 7)
        pack(list_folder(root / "data"), root / "packed", Packing(None), workers=1)
    return root / "packed"


def open_images(folder: Path, test: bool = False) -> Images:
    """The images on the disk."""
    found = open_shards(folder)
    rows = np.flatnonzero(found.index.columns["test"] == test)
    columns = {name: torch.from_numpy(column[rows]) for name, column in found.index.columns.items()}
    x = Stored(found, torch.from_numpy(rows), torch.stack([columns["height"], columns["width"]], 1), SIDE)
    return Images(x, columns["label"], "packed")


def read_images(folder: Path, test: bool = False) -> Images:
    """The same in memory."""
    return open_images(folder, test).compact()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two images, windows of about six, pieces of about two."""
    one = 27 * 21 * 3
    monkeypatch.setattr(stored, "BLOCK", 2 * one)
    monkeypatch.setattr(stored, "WINDOW", 6 * one)
    monkeypatch.setattr(feed, "PIECE", 3 * one)


def see(x: Tensor | Ragged, which: Tensor) -> Tensor:
    """Images cut at random places, by numbers that depend on their positions."""
    drawn = CROP.draw((100,), generator(0))[which]
    return CROP(x, which, drawn)


def no_threads() -> bool:
    """Whether no reader is left."""
    return not any(thread.name == "equipoise reader" for thread in threading.enumerate())


@pytest.mark.parametrize("size", [1, 4, 6])
@pytest.mark.parametrize("near", [[], [3, 59, 20], range(60)], ids=["none", "some", "all"])
def test_the_images_of_each_batch_are_at_hand_in_any_order(packed: Path, size: int, near: Sequence[int]) -> None:
    images, resident = open_images(packed), read_images(packed).x
    assert isinstance(images.x, Stored) and isinstance(resident, Ragged)
    source = Feed(images.x, torch.tensor([*near], dtype=torch.long))
    for epoch in range(2):
        batches = torch.randint(0, 60, (90 // size, size), generator=generator(epoch))
        source.lay_out([batches[:9], batches[9:]])
        for k, which in enumerate(source.follow(batches)):
            assert torch.equal(see(source.x, which), see(resident, which)), (epoch, k)
        assert k == len(batches) - 1 and no_threads()


def test_the_next_epoch_is_read_before_this_one_is_over(packed: Path) -> None:
    """If it comes as announced; if others come, these are read instead."""
    images, resident = open_images(packed), read_images(packed).x
    assert isinstance(images.x, Stored) and isinstance(resident, Ragged)
    source = Feed(images.x, torch.tensor([4]))
    epochs = [torch.randperm(60, generator=generator(k)).view(-1, 5) for k in range(4)]
    readings = []
    for batches, announced in zip(epochs, (epochs[1], epochs[0], None, None)):
        source.lay_out([batches], lambda announced=announced: [] if announced is None else [announced])
        for which in source.follow(batches):
            assert torch.equal(see(source.x, which), see(resident, which))
        readings.append(source.reading)
        if announced is not None:
            reading = source.reading
            assert reading is not None
            with reading.change:  # its first part is there, while nobody asks for it
                assert reading.change.wait_for(
                    lambda r=reading: r.placed + 1 in r.parts and not r.parts[r.placed + 1].left, 9
                )
    assert readings[0] is readings[1] is not None and readings[2] is None and readings[3] is None and no_threads()


@pytest.mark.parametrize("repeated", [1, 5])
def test_a_batch_may_be_larger_than_the_window(packed: Path, repeated: int) -> None:
    """A window of six images grows to the largest batch; an image that a batch has several times is there once."""
    images, resident = open_images(packed), read_images(packed).x
    assert isinstance(images.x, Stored) and isinstance(resident, Ragged)
    source = Feed(images.x, torch.tensor([2]))
    batches = torch.stack([torch.randperm(60, generator=generator(k))[:23].repeat(repeated) for k in range(8)])
    source.lay_out([batches[:, :11], batches[:, :23], batches])
    for which in source.follow([*batches[:, :11], *batches[:, :23], *batches]):
        assert torch.equal(see(source.x, which), see(resident, which))
    assert source.window == min(23 * repeated, 59) * 27 * 21 * 3


def test_an_epoch_that_reads_more_than_the_first_is_refused(packed: Path) -> None:
    """There is no room for it, and a recorded step reads where the window was."""
    for first, later in (([[9, 10]], range(7, 16)), ([[0, 1]], [10])):
        source = Feed(open_images(packed).x, torch.arange(9))  # type: ignore[arg-type]
        source.lay_out([torch.tensor(first)])
        with pytest.raises(UsageError, match="a method must read as many images in every epoch of a stage"):
            source.lay_out([torch.tensor([*later])[None]])


def test_a_stage_on_images_that_stay_has_no_window(packed: Path) -> None:
    images, resident = open_images(packed), read_images(packed).x
    assert isinstance(images.x, Stored) and isinstance(resident, Ragged)
    near = torch.tensor([3, 59, 20, 21])
    source = Feed(images.x, near)
    source.lay_out([near.view(2, 2)])
    for which in source.follow(near.view(2, 2)):
        assert torch.equal(see(source.x, which), see(resident, which)) and no_threads()
    assert len(source.x.pixels) == 4 * 27 * 21 * 3 and not source.buffers


def test_a_thread_that_cannot_start_says_so_itself(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, []

    def fail(self: threading.Thread) -> None:
        started.append(self)
        if len(started) > 2:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", fail)
    source = Feed(open_images(packed).x, torch.tensor([0]))  # type: ignore[arg-type]
    source.lay_out([torch.arange(60).view(-1, 5)])
    with pytest.raises(RuntimeError, match="can't start new thread"):
        list(source.follow(range(12)))
    assert len(started) == 3 and no_threads()


def test_what_is_known_of_parts_that_are_used_does_not_grow(packed: Path) -> None:
    source = Feed(open_images(packed).x, torch.tensor([0]))  # type: ignore[arg-type]
    source.lay_out([torch.arange(60).repeat(9).view(-1, 5)])
    for _ in source.follow(range(108)):
        reading = source.reading
        assert reading is not None and len(reading.events) == 2
        assert len(reading.parts) <= shards.THREADS + 2, "each thread has planned one"
    assert reading.used > 80


def test_exemplars_that_do_not_fit_the_gpu_name_the_memory(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Tensor, size: int) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Tensor, "resize_", fail)
    with pytest.raises(RunError, match=r"0\.0 GB of exemplars, .* lower Learner\(memory=\.\.\.\)") as refused:
        Feed(open_images(packed).x, torch.arange(9)).lay_out([torch.arange(6)[None]])  # type: ignore[arg-type]
    assert refused.value.with_flags.endswith("do not fit the GPU: lower --memory or --batch")
    with pytest.raises(torch.OutOfMemoryError):
        Feed(open_images(packed).x, torch.arange(0)).lay_out([torch.arange(6)[None]])  # type: ignore[arg-type]


# The order of an epoch


def make_stored(classes: int, of_each: int) -> tuple[Stored, Tensor]:
    """Images as large as ImageNet's, class after class on a disk that nobody reads, and their labels."""
    count = classes * of_each
    x = Stored(None, torch.arange(count), torch.tensor([[256, 341]]).expand(count, 2), 224)  # type: ignore[arg-type]
    return x, torch.arange(count) // of_each


def test_an_epoch_has_every_image_as_often_as_it_should_and_each_time_in_another_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, _ = make_stored(20, 50)
    monkeypatch.setattr(stored, "BLOCK", 4 * int(x.bytes[0]))
    monkeypatch.setattr(stored, "WINDOW", 100 * int(x.bytes[0]))
    for which in (torch.randperm(1000), torch.arange(0, 1000, 3), torch.arange(900).repeat(3), torch.arange(0)):
        found = shuffle_blocks(x, which, generator(1))
        assert torch.equal(found.sort().values, which.sort().values)
        assert torch.equal(found, shuffle_blocks(x, which.flip(0), generator(1)))
        assert len(which) == 0 or not torch.equal(found, shuffle_blocks(x, which, generator(2)))
    found = shuffle_blocks(x, torch.arange(900).repeat(3), generator(0))
    places = found.argsort(stable=True).view(900, 3)  # where each image comes
    apart = (places[:, 2] - places[:, 0]).double().mean()
    assert apart == pytest.approx(2700 / 2, rel=0.1), "as far as if they were shuffled alone"


def test_an_epoch_is_read_in_blocks_and_shuffled_almost_as_well_as_if_it_were_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 100 classes, a batch of 128 has 72 if all images are shuffled: here it has hardly fewer, though all classes
    lie one after the other on the disk. An image's place says nothing of when it comes."""
    monkeypatch.setattr(stored, "BLOCK", 2**20)
    monkeypatch.setattr(stored, "WINDOW", 2**29)
    x, y = make_stored(100, 200)
    found = shuffle_blocks(x, torch.randperm(len(x)), generator(0))
    batches = y[found][: 128 * 156].view(156, 128)
    distinct = float(np.mean([len(batch.unique()) for batch in batches]))
    assert distinct > 0.95 * 100 * (1 - (1 - 1 / 100) ** 128)
    place = torch.arange(len(x))
    assert abs(np.corrcoef(found, place)[0, 1]) < 0.05
    assert float((found - place).abs().double().mean()) == pytest.approx(len(x) / 3, rel=0.05)
    neighbours = (y[found][1:] == y[found][:-1]).double().mean()  # 0.01 by chance
    assert neighbours < 0.015
    window = found[: 2**29 // (256 * 341 * 3)].sort().values
    jumps = int((window.diff() > 1).sum())
    assert jumps < len(window) / 3.5  # four images lie together


# Training


def make_learner(method: Method | None = None, memory: int | str = 3) -> Learner:
    recipe = Recipe(epochs=3, lr=0.05, batch=5)
    return Learner(method or ILBaseline(Balanced()), memory, recipe=recipe, augment=CROP, device="cpu", seed=3)


def get_weights(learner: Learner) -> dict[str, Tensor]:
    assert learner.state_.net is not None
    return learner.state_.net.state_dict()


def same(a: Learner, b: Learner) -> bool:
    return all(torch.equal(w, get_weights(b)[name]) for name, w in get_weights(a).items())


def test_every_image_comes_once_in_an_epoch(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a short batch at the end, each epoch has each image; with joined ones, all epochs together."""
    monkeypatch.setattr(stored, "WINDOW", 7 * 27 * 21 * 3)
    images, seen = open_images(packed), []
    cut = ResizedCrop.cut

    def spy(self: ResizedCrop, x: Ragged, which: Tensor, *rest: Any) -> Tensor:
        seen.append(which.clone())
        return cut(self, x, which, *rest)

    monkeypatch.setattr(ResizedCrop, "cut", spy)
    for last in ("short", "joined"):
        seen.clear()
        one = make_learner()
        one.recipe = Recipe(epochs=3, lr=0.05, batch=7, last=last)  # type: ignore[arg-type]
        one.learn(images, range(5))
        counts = torch.bincount(torch.cat(seen), minlength=60)
        assert [len(part) for part in seen[:9]].count(4) == (last == "short")
        if last == "short":
            assert counts.tolist() == [3] * 60
        else:  # 26 batches of 7 are 182
            assert counts.sum() == 182 and set(counts.tolist()) == {3, 4}


@pytest.mark.parametrize(
    "method",
    [ILBaseline(Balanced()), ILBaseline(Meta(every=2)), LUCIR(finetune=Finetune(2, 0.01, 4))],
    ids=["balanced", "meta", "lucir"],
)
def test_images_on_the_disk_are_learned_and_seen_as_those_in_memory(packed: Path, method: Method) -> None:
    """Evaluation, features and herding are the same to the bit; in training only the order is another."""
    images, test = open_images(packed), open_images(packed, test=True)
    learner = make_learner(method)
    for classes in (range(3), range(3, 5)):
        learner.learn(images, classes)
    assert learner.state_.kept is not None and learner.exemplars_ is None and no_threads()
    where = torch.tensor([3, 14, 0, 7])
    resident = read_images(packed, test=True)
    assert torch.equal(learner.logits_at(test.x, where), learner.logits_at(resident.x, where))
    assert torch.equal(learner.logits_at(test.x, None), learner.logits_at(resident.x, None))
    net = learner.state_.net
    assert net is not None
    both = [embed(one, net, torch.arange(59, -1, -1)) for one in (images, read_images(packed))]
    assert torch.equal(*both)
    other = make_learner(method)
    other.learn(read_images(packed), range(3))
    assert not same(learner, other)
    assert torch.equal(images.take_squares(where), read_images(packed).take_squares(where))
    own = learner.own_exemplars(images).exemplars_
    assert own is not None and isinstance(own.x, Ragged) and len(own) == 15
    assert all(torch.equal(a, b) for a, b in zip(measure_channels(images.x), measure_channels(read_images(packed).x)))
    one, other = Images(images.x, images.y), Images(images.x, images.y.flip(0))
    assert one.fingerprint() == images.fingerprint() != other.fingerprint() != one.fingerprint(where)


def test_training_from_the_disk_is_that_from_memory_in_its_order(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, exemplars and images held out included: where the pixels are changes nothing but the order."""
    images, arranges, readings = open_images(packed), [], []
    open_source, add = train.open_source, feed.Reading.add

    def count(self: feed.Reading, layout: feed.Layout) -> None:
        readings.append(self)
        add(self, layout)

    monkeypatch.setattr(feed.Reading, "add", count)

    def note(s: Step) -> feed.Source:
        source = open_source(s)
        arranges.append(source.arrange)
        return source

    monkeypatch.setattr(train, "open_source", note)
    one, other = (make_learner(ILBaseline(Meta(every=2))) for _ in range(2))
    for classes in (range(3), range(3, 5)):
        one.learn(images, classes)
    order = iter(arranges.copy())
    of_training = [readings.count(reading) for reading in dict.fromkeys(readings) if readings.count(reading) > 1]
    assert of_training == [3, 3], "all epochs of a step are one reading"

    def take_order(s: Step) -> feed.Source:
        source = open_source(s)
        source.arrange = next(order)  # type: ignore[method-assign]
        return source

    monkeypatch.setattr(train, "open_source", take_order)
    for classes in (range(3), range(3, 5)):
        other.learn(read_images(packed), classes)
    assert same(one, other) and one.alphas_ == other.alphas_ and one.alphas_[1] != 1


def test_exemplars_that_are_herded_are_those_of_images_in_memory(packed: Path, tmp_path: Path) -> None:
    """From equal weights: a learner is saved before it chooses, and goes on with images of the other kind."""
    images, kept = open_images(packed), []

    def save(learner: Learner) -> None:
        if learner.chooses_next_:
            learner.save(tmp_path / "before")

    one = make_learner().learn(images, range(5), save)
    for source in (images, read_images(packed)):
        other = Learner.load(tmp_path / "before").learn(source, range(5))
        kept.append(other.state_.kept)
    assert one.state_.kept is not None and all(torch.equal(one.state_.kept, found) for found in kept)
    tensors = safetensors.torch.load(next((tmp_path / "before").glob("*.safetensors")).read_bytes())
    assert not any(tensor.dtype == torch.uint8 for tensor in tensors.values())


class StoppedError(Exception):
    """In place of a kill."""


@pytest.mark.parametrize("remedy", [Balanced(), BalancedFinetuning(Finetune(3, 0.05, 4))], ids=lambda r: r.name)
@pytest.mark.parametrize("at", [0.4, 1.0, 1.6, 2.8])
def test_a_step_that_is_stopped_in_an_epoch_goes_on_to_the_same_bits(
    packed: Path, tmp_path: Path, remedy: Any, at: float
) -> None:
    images = open_images(packed)
    straight = make_learner(ILBaseline(remedy))
    first = straight.learn(images, range(3))
    first.save(tmp_path / "saved")
    straight.learn(images, range(3, 5))

    def stop(epochs: float) -> None:
        if epochs >= at:
            raise StoppedError

    learner = Learner.load(tmp_path / "saved")
    with pytest.raises(StoppedError):
        learner.learn(images, range(3, 5), lambda learner: learner.save(tmp_path / "saved"), stop)
    assert no_threads()
    resumed = Learner.load(tmp_path / "saved").learn(images, range(3, 5))
    assert resumed.unfinished_ is False and same(resumed, straight)
    assert torch.equal(resumed.state_.kept, straight.state_.kept)  # type: ignore[arg-type]


def test_a_second_stream_is_at_hand_too(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DDE's ten neighbours of each image lie anywhere."""
    monkeypatch.setattr(stored, "WINDOW", 2**20)
    images = open_images(packed)
    one = make_learner(DDE())
    for classes in (range(3), range(3, 5)):
        one.learn(images, classes)
    assert one.logits_at(open_images(packed, test=True).x, None).isfinite().all()


def test_a_second_stream_may_be_larger_than_the_window(packed: Path) -> None:
    """Of six images, where a batch and its neighbours are up to 55; the base step has no neighbours."""
    images = open_images(packed)
    one = make_learner(DDE())
    for classes in (range(3), range(3, 5)):
        one.learn(images, classes)
    assert one.sizes_ == (3, 2) and no_threads()


def test_batches_have_as_many_old_images_as_their_method_gives_them(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fifth of SS-IL's, where the exemplars are more than stay on the device too."""
    monkeypatch.setattr(feed, "NEAR", 0)
    arrange, both = Feed.arrange, []

    def note(self: Feed, which: Tensor, gen: torch.Generator) -> Tensor:
        both.append((which, arrange(self, which, gen)))
        return both[-1][1]

    monkeypatch.setattr(Feed, "arrange", note)
    images, one = open_images(packed), make_learner(SSIL())
    one.learn(images, range(3))
    both.clear()
    one.learn(images, range(3, 5))
    assert len(both) >= 3
    for given, arranged in both:
        assert torch.equal(given.flatten().sort().values, arranged.flatten().sort().values)
        assert not torch.equal(given, arranged)
        assert ((images.y[arranged] < 3).sum(1) == max(1, given.shape[1] // 5)).all()


def test_images_on_the_disk_are_seen_in_inference_mode_too(packed: Path) -> None:
    test, learner = open_images(packed, test=True), make_learner()
    learner.learn(read_images(packed), range(5))
    with torch.inference_mode():
        found = learner.logits_at(test.x, None)
    assert torch.equal(found, learner.logits_at(test.x, None))


def test_pixels_of_exemplars_are_learned_in_memory_only(packed: Path) -> None:
    with pytest.raises(UsageError, match=r"mnemonics learns pixels of exemplars, .*: use --images-on device"):
        make_learner(Mnemonics()).learn(open_images(packed), range(3))
    own = make_learner().learn(read_images(packed), range(3)).own_exemplars(read_images(packed))
    with pytest.raises(UsageError, match="beside pixels that a method or a learner keeps: use --images-on device"):
        own.learn(open_images(packed), range(3, 5))


# What goes wrong


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_what_is_damaged_meanwhile_is_named_and_nothing_hangs(packed: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(packed, tmp_path / "packed")
    images, path = open_images(tmp_path / "packed"), tmp_path / "packed" / name_shard(3)
    data = bytearray(path.read_bytes())
    words = {
        "truncated": r"cannot be read \(the file is too short\)",
        "changed": "is damaged",
        "missing": "cannot be read",
    }

    def spoil(learner: Learner) -> None:
        if damage == "missing":
            path.unlink()
        else:
            data[-5] ^= 1
            path.with_suffix(".new").write_bytes(data[:50] if damage == "truncated" else data)
            path.with_suffix(".new").replace(path)  # at once, since the next epoch is being read

    with pytest.raises(DataError, match=f"{name_shard(3)} {words[damage]}"):
        make_learner().learn(images, range(5), spoil)
    assert no_threads()


# Memory


def write_noise(folder: Path, count: int, height: int, width: int, classes: int = 2) -> Images:
    """Images of noise on the disk, in one shard; of each class, the pixels have a mean of their own."""
    rng, one, sums = np.random.default_rng(0), 3 * height * width, []
    with (folder / name_shard(0)).open("wb") as f:
        for k in range(count):
            data = (np.frombuffer(rng.bytes(one), np.uint8) // 2 + 120 * (k % classes) // classes).tobytes()
            f.write(data)
            sums.append(zlib.crc32(data))
    row = np.arange(count)
    columns = {name: np.zeros(count, np.int64) for name in COLUMNS}
    columns |= {"offset": row * one, "label": row % classes, "checksum": np.array(sums)}
    columns |= {"height": np.full(count, height), "width": np.full(count, width)}
    found = Shards(folder, Index(tuple(map(str, range(classes))), columns, b"", [count * one], {}))
    size = torch.tensor([[height, width]]).expand(count, 2).contiguous()
    return Images(Stored(found, torch.arange(count), size, SIDE), torch.from_numpy(row % classes), "noise")


def learn_large(folder: Path, out: Any) -> None:
    """In a process of its own: how much its memory grows, in bytes."""
    images = write_noise(folder, 256, 16, 2**14)  # of which a net sees little
    stored.WINDOW, predict.AHEAD, predict.CHUNK = 2**23, 2**23, 8 * SIDE**2
    feed.PIECE, shards.THREADS = 2**20, 2
    recipe = Recipe(epochs=1, lr=0.05, batch=4)
    grey = ((0.5,) * 3, (0.3,) * 3)
    learner = Learner(ILBaseline(), 3, recipe=recipe, augment=CROP, normalise=grey, device="cpu")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    learner.learn(images, range(2))
    learner.logits_at(images.x, None)
    out.put(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))


def test_memory_holds_the_window_and_the_buffers_and_not_the_set(tmp_path: Path) -> None:
    """Of 201 MB, two halves of a window of 8 MiB and four buffers of 1.5 MiB are there at a time.

    With what the training itself takes, that is 57 to 75 MB, by how the allocator happens to reuse memory.
    """
    fork = multiprocessing.get_context("fork")
    out = fork.Queue()
    process = fork.Process(target=learn_large, args=(tmp_path, out))
    process.start()
    grown = out.get(timeout=60)
    process.join()
    assert 2**24 < grown < 201e6 / 2


# Runs


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of images that count as large."""
    for module in (packing, folders):
        monkeypatch.setattr(module, "SMALL", 8)
    return make_tree(tmp_path / "data", classes=4, train=9, width=27, height=21)


def test_a_run_from_the_disk_ends_with_a_record_that_says_so(
    tree: Path, isolated: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    words = f"run il-baseline --dataset folder --data {tree} --size 16 --base 2 --steps 2 --memory 2 --device cpu"
    words += " --epochs 2 --batch 5 --images-on disk"
    assert run_command([*words.split(), "--out", "one"]) == 0
    one = json.loads(Path("one/result.json").read_text())
    assert one["run"]["data"]["images_on"] == "disk"
    assert "images on the disk" in describe_changes(one)
    assert one["resolved"]["shuffled_in"] == {"block": 2 * 27 * 21 * 3, "window": 6 * 27 * 21 * 3}
    assert [step["classes"] for step in one["steps"]] == [2, 3, 4] and np.sum(one["confusion"]) == 8
    exemplars = Learner.load("one/model").exemplars_
    assert exemplars is not None and len(exemplars) == 8
    assert run_command([*words.replace("on disk", "on device").split(), "--out", "two"]) == 0
    two = json.loads(Path("two/result.json").read_text())
    assert "shuffled_in" not in two["resolved"] and two["reused"] is None, "another order, so no step is shared"
    assert run_command([*words.split(), "--out", "three"]) == 0
    assert json.loads(Path("three/result.json").read_text())["confusion"] == one["confusion"]
    monkeypatch.setattr(folders, "ROOM", 10_000)
    assert run_command([*words.removesuffix(" --images-on disk").split(), "--out", "one"]) == 0, "chosen by itself"
    (tree / "packed-16" / name_shard(0)).write_bytes(bytes(36 * 18 * 23 * 3))
    capsys.readouterr()
    assert run_command([*words.split(), "--seed", "1", "--out", "four"]) == 1
    err = capsys.readouterr().err
    assert f"{tree / 'packed-16' / name_shard(0)} is damaged: delete the folder" in err and err.count("\n") == 1


def test_a_run_that_is_stopped_in_an_epoch_ends_as_one_that_was_not(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Run(
        ILBaseline(), Data("folder", size=16, images_on="disk"), Protocol(2, 2, memory="2"), Recipe(3, 0.05, batch=5)
    )
    options, tick = Options(tree, checkpoint=0), Attempt.tick
    straight = run(settings, tmp_path / "straight", CPU, options)
    for moment in ((1, 0.4), (0, 1.8), (2, 2.0)):

        def stop(self: Attempt, epochs: float, moment: tuple[int, float] = moment) -> None:
            tick(self, epochs)
            if (self.t, epochs) >= moment:
                raise StoppedError

        monkeypatch.setattr(Attempt, "tick", stop)
        with pytest.raises(StoppedError):
            run(settings, tmp_path / "stopped", CPU, options)
    monkeypatch.setattr(Attempt, "tick", tick)
    resumed = run(settings, tmp_path / "stopped", CPU, options)
    for record in (straight, resumed):
        drop_times(record)
    assert resumed == straight
    models = [json.loads((tmp_path / name / "model/learner.json").read_text()) for name in ("straight", "stopped")]
    assert models[0]["sha256"] == models[1]["sha256"]


def test_images_that_do_not_fit_the_gpu_may_stay_on_the_disk(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Ragged, device: Any) -> Ragged:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Ragged, "to", fail)
    settings = Run(data=Data("folder", size=16), protocol=Protocol(2, 2))
    with pytest.raises(
        RunError, match=r'0 GB of images do not fit the GPU: choose Data\(images_on="disk"\)'
    ) as refused:
        prepare(settings, CPU, tree)
    assert refused.value.with_flags.endswith("choose --images-on disk")
    plan = prepare(replace(settings, data=Data("folder", size=16, images_on="disk")), CPU, tree)
    assert isinstance(plan.train.x, Stored) and plan.run.data.images_on == "disk"


def test_a_place_that_is_chosen_is_another_run_only_where_it_is_another_place(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(images_on: Literal["device", "disk"] | None) -> Prepared:
        settings = Run(ILBaseline(), Data("folder", size=16, images_on=images_on), Protocol(2, 2), Recipe(2, 0.05))
        return prepare(settings, CPU, tree)

    assert plan("device").settings == plan(None).settings != plan("disk").settings
    assert plan("device").compute_keys() == plan(None).compute_keys() != plan("disk").compute_keys()
    assert "images_on" not in plan("device").settings["run"]["data"]
    monkeypatch.setattr(folders, "ROOM", 10_000)  # so that they are on the disk unless one chooses
    assert plan("disk").settings == plan(None).settings != plan("device").settings
    assert plan("device").run.data.images_on == "device" and plan(None).run.data.images_on == "disk"


def test_small_images_stay_in_memory(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "data")
    with pytest.raises(UsageError, match="images of up to 64 pixels are not read while training: remove --images-on"):
        load("folder", root, progress=False, images_on="disk")
    assert isinstance(load("folder", root, progress=False).train.x, Tensor)
