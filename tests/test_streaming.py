"""NCM and SLDA: class statistics on the features of the base step, image by image; and what methods share of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.covariance import OAS
from torch import Tensor

from equipoise import Balanced, ClassOversampling, Learner, LossRescaling, Meta, Recipe, Relaxed, UsageError
from equipoise.cli import run_command
from equipoise.data.images import Images, sum_by_class
from equipoise.method import Method
from equipoise.methods.bounds import FineTuning, Joint
from equipoise.methods.il_baseline import ILBaseline
from equipoise.methods.lucir import LUCIR
from equipoise.methods.ncm import NCM
from equipoise.methods.podnet import PODNet
from equipoise.methods.slda import SLDA
from equipoise.nets import Out
from equipoise.runs.plan import prepare
from equipoise.runs.run import run
from equipoise.runs.settings import Data, Machine, Protocol, Run
from equipoise.step import Finetune, Learned, Step

D = 6


def stream(classes: list[int], count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Embeddings around a centre for each class, the classes mixed and of unequal number."""
    gen = torch.Generator().manual_seed(seed)
    y = torch.tensor([classes[int(k)] for k in torch.randint(0, len(classes), (count,), generator=gen)])
    centres = 3 * torch.randn(20, D, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    return centres[y] + torch.randn(count, D, generator=gen, dtype=torch.float64), y


def noted(method: Method, *steps: tuple[Tensor, Tensor]) -> Learned:
    """What `after` keeps, after so many steps."""
    state: dict[str, Tensor] = {}
    n_old, sizes, none = 0, (), torch.zeros(0, dtype=torch.long)
    for t, (h, y) in enumerate(steps):
        now = int(y.max()) + 1
        sizes = (*sizes, now - n_old)
        n, everything = torch.bincount(y, minlength=now).float(), torch.arange(len(y))
        net: Any = object()

        def embed(of: Any, where: Tensor, view: Any = None, net: Any = net, h: Tensor = h) -> Tensor:
            assert of is net and view is None
            return h[where]

        method.after(
            Step(
                t, sizes, (1, 8, 8), n=n, lam=n, images=Images(torch.zeros(len(y), 1), y), data=everything,
                memory=none, held=none, where=everything, net=net, teacher=None, state=state, embed=embed,
            )
        )  # fmt: skip
        n_old = now
    return Learned(sizes, state)


STEPS = (stream([0, 1, 2], 60, 1), stream([3, 4], 30, 2), stream([5], 7, 3))


def out_of(h: Tensor) -> Out:
    return Out(torch.zeros(len(h), 3), h, [], {})


def test_features_are_added_up_class_by_class() -> None:
    h, y = stream([0, 1, 3], 7, seed=2)
    sums = sum_by_class(h, y, 5)
    torch.testing.assert_close(sums, h.new_zeros(5, h.shape[1]).index_add(0, y, h))
    assert not sums[2].any() and not sums[4].any(), "of classes without images"


def test_ncm_is_the_nearest_mean_of_directions() -> None:
    known = noted(NCM(), *STEPS)
    x, _ = stream([0, 1, 2, 3, 4, 5], 40, 4)
    scores = NCM().scores(out_of(x.float()), known)
    assert scores.shape == (40, 6)
    for k in range(6):
        own = [h / np.linalg.norm(h) for hs, ys in STEPS for h, y in zip(hs.numpy(), ys.tolist()) if y == k]
        mean = np.mean(own, 0) / np.linalg.norm(np.mean(own, 0))
        for i, h in enumerate(x.numpy()):
            far = np.linalg.norm(h / np.linalg.norm(h) - mean) ** 2
            assert scores[i, k].item() == pytest.approx(-far, abs=1e-5)


def test_ncm_without_unit_length_is_the_nearest_mean() -> None:
    method = NCM(unit_length=False)
    known = noted(method, *STEPS)
    state = known.state
    x, _ = stream([0, 1, 2, 3, 4, 5], 40, 4)
    x = x * torch.linspace(0.2, 3, 40, dtype=torch.float64)[:, None]  # lengths that count
    scores = method.scores(out_of(x), known)
    assert state["means"].dtype == torch.float64 and scores.dtype == torch.float32 and scores.shape == (40, 6)
    for k in range(6):
        mean = np.mean([h for hs, ys in STEPS for h, y in zip(hs.numpy(), ys.tolist()) if y == k], 0)
        np.testing.assert_allclose(state["means"][k].numpy(), mean, rtol=1e-12)
        for i, h in enumerate(x.numpy()):
            assert scores[i, k].item() == pytest.approx(-np.sum((h - mean) ** 2), rel=1e-6)
    usual = NCM().scores(out_of(x.float()), noted(NCM(), *STEPS))
    assert (usual.argmax(1) != scores.argmax(1)).any()


@pytest.mark.usefixtures("isolated")
def test_the_command_asks_for_either_ncm_and_shares_the_base_step() -> None:
    words = ["run", "ncm", "--dataset", "digits", "--epochs", "2", "--steps", "1"]
    assert (
        run_command([*words, "--out", "usual"]) == 0
        and run_command([*words, "--no-unit-length", "--out", "plain"]) == 0
    )
    usual, plain = (json.loads(Path(name, "result.json").read_text()) for name in ("usual", "plain"))
    assert usual["run"]["method"]["unit_length"] is True and plain["run"]["method"]["unit_length"] is False
    assert plain["reused"]["steps"] == [0] and plain["confusion"] != usual["confusion"]
    loaded = Learner.load("plain/model")
    assert loaded.method == NCM(unit_length=False) and loaded.state_.extra["means"].dtype == torch.float64


def test_slda_is_the_stream_image_by_image() -> None:
    """The authors' update, one image after the other: Σ moves by the distance to the mean before the image."""
    (base, y0), *later = STEPS
    means = {k: base[y0 == k].mean(0).numpy() for k in range(3)}
    counts = {k: int((y0 == k).sum()) for k in range(3)}
    centred = np.stack([h - means[int(k)] for h, k in zip(base.numpy(), y0)])
    sigma, seen = OAS(assume_centered=True).fit(centred).covariance_, len(base)
    for hs, ys in later:
        for h, k in zip(hs.numpy(), ys.tolist()):
            far = h - means.setdefault(k, np.zeros(D))
            sigma = (seen * sigma + np.outer(far, far) * seen / (seen + 1)) / (seen + 1)
            means[k] = means[k] + far / (counts.setdefault(k, 0) + 1)
            counts[k] += 1
            seen += 1
    known = noted(SLDA(), *STEPS)
    state = known.state
    np.testing.assert_allclose(state["sigma"], sigma, rtol=1e-10)
    np.testing.assert_allclose(state["means"], np.stack([means[k] for k in range(6)]), rtol=1e-10)
    assert state["seen"].item() == seen

    x, _ = stream([0, 1, 2, 3, 4, 5], 40, 4)
    inverse = np.linalg.pinv((1 - 1e-4) * sigma + 1e-4 * np.eye(D))
    expected = [[h @ inverse @ means[k] - means[k] @ inverse @ means[k] / 2 for k in range(6)] for h in x.numpy()]
    np.testing.assert_allclose(SLDA().scores(out_of(x), known), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", [NCM(), SLDA()], ids=lambda m: m.name)
def test_the_net_rests_after_the_base_step_and_knows_only_classes_it_has_seen(method: Method) -> None:
    gen = torch.Generator().manual_seed(0)
    y = torch.arange(90) % 3
    x = torch.randint(0, 80, (90, 1, 8, 8), dtype=torch.uint8, generator=gen)
    for i, k in enumerate(y.tolist()):
        x[i, 0, 2 * k : 2 * k + 2] += 150
    learner = Learner(method, memory=0, recipe=Recipe(epochs=4, lr=0.05, batch=16))
    learner.learn(x[y < 2], y[y < 2])
    net = learner.state_.net
    assert net is not None
    before = {k: v.clone() for k, v in net.backbone.state_dict().items()}
    learner.learn(x[y == 2], y[y == 2])
    assert learner.state_.net is not None
    assert all(torch.equal(v, before[k]) for k, v in learner.state_.net.backbone.state_dict().items())
    assert learner.logits(x).shape == (90, 3)
    assert (learner.predict(x) == y.numpy()).mean() > 0.95


def test_before_anything_is_noted_the_logits_count() -> None:
    out = Out(torch.randn(4, 2), torch.randn(4, D), [], {})
    nothing = Learned((2,), {})
    assert NCM().scores(out, nothing) is out.z and SLDA().scores(out, nothing) is out.z


# What methods share of the base step ------------------------------------------------------------------------


def base_key(method: Method) -> str:
    one = Run(method, Data("digits"), Protocol(memory="all"), Recipe(epochs=1))
    key = prepare(one, Machine("cpu")).compute_keys()[0]
    assert key is not None
    return key


def test_one_base_step_serves_all_that_begin_alike() -> None:
    alike = [
        ILBaseline(),
        ILBaseline(Balanced(0.5)),
        ILBaseline(Meta(), T=3.0),
        ILBaseline(LossRescaling()),
    ]
    alike += [NCM(), SLDA(), FineTuning(Relaxed()), Joint()]
    assert len({base_key(m) for m in alike}) == 1
    cosines = [LUCIR(), LUCIR(Balanced(), K=1, m=0.1, ratio="paper"), LUCIR(finetune=Finetune(20), lambda_base=1.0)]
    assert len({base_key(m) for m in cosines}) == 1


def test_podnets_own_loss_begins_differently() -> None:
    """NCA is another loss than the cross-entropy in the base step too."""
    own, replaced = base_key(PODNet()), base_key(PODNet(Balanced()))
    assert len({own, replaced, base_key(ILBaseline()), base_key(LUCIR()), base_key(PODNet(nca="paper"))}) == 5
    assert base_key(PODNet(finetune=Finetune(0), lambda_c=1.0)) == own
    assert base_key(PODNet(Relaxed())) == base_key(PODNet(Meta())) == replaced


def test_a_shared_base_step_is_the_same_step() -> None:
    """Whoever shares must compute the same bits."""
    gen = torch.Generator().manual_seed(1)
    x, y = torch.randint(0, 256, (60, 1, 8, 8), dtype=torch.uint8, generator=gen), torch.arange(60) % 3
    for group in (
        [ILBaseline(), ILBaseline(Balanced()), NCM(), SLDA(), FineTuning(), Joint()],
        [LUCIR(), LUCIR(Balanced(), K=1)],
        [PODNet(Balanced()), PODNet(Relaxed())],
    ):
        nets = [Learner(m, memory="all", recipe=Recipe(epochs=1, batch=20)).learn(x, y).state_.net for m in group]
        first = nets[0].state_dict()  # type: ignore[union-attr]
        for net in nets[1:]:
            assert all(torch.equal(v, first[k]) for k, v in net.state_dict().items())  # type: ignore[union-attr]


def test_bad_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="shrinkage"):
        SLDA(shrinkage=0)
    with pytest.raises(UsageError, match=r"ncm does not support the remedy class-oversampling .*: use standard or"):
        Learner(NCM(ClassOversampling()), memory=5)
    assert NCM().with_remedy(Balanced()).at_base() == ILBaseline()


def test_joint_training_begins_anew_on_everything() -> None:
    gen = torch.Generator().manual_seed(2)
    y = torch.arange(120) % 4
    x = torch.randint(0, 60, (120, 1, 8, 8), dtype=torch.uint8, generator=gen)
    for i, k in enumerate(y.tolist()):
        x[i, 0, 2 * k : 2 * k + 2] += 150
    learner = Learner(Joint(), memory="all", recipe=Recipe(epochs=5, lr=0.05, batch=16))
    learner.learn(x[y < 2], y[y < 2])
    first = learner.state_.net
    learner.learn(x[y >= 2], y[y >= 2])
    net = learner.state_.net
    assert first is not None and net is not None and learner.exemplars_ is not None
    assert len(learner.exemplars_.y) == 120 and torch.equal(net.mean, first.mean)
    assert (learner.predict(x) == y.numpy()).mean() > 0.95
    with pytest.raises(UsageError, match="joint needs all images in memory, which keeps 20: use --memory all"):
        Learner(Joint(), memory=20)
    with pytest.raises(UsageError, match="its training set is balanced"):
        Learner(Joint(Balanced()), memory="all")


def test_meta_holds_out_a_part_of_everything() -> None:
    gen = torch.Generator().manual_seed(3)
    x, y = torch.randint(0, 256, (80, 1, 8, 8), dtype=torch.uint8, generator=gen), torch.arange(80) % 4
    learner = Learner(ILBaseline(Meta(every=2)), memory="all", recipe=Recipe(epochs=2, batch=8))
    for part in (y < 2, y >= 2):
        learner.learn(x[part], y[part])
    assert learner.alphas_[0] is None and learner.alphas_[1] != 1


def test_what_a_method_notes_is_saved_in_the_middle_of_a_step(tmp_path: Any) -> None:
    class Counting(FineTuning):
        name = "counting"

        def after(self, s: Step) -> None:
            s.state["count"] = s.state.get("count", torch.zeros(())) + len(s.embed(s.net, s.data))

    gen = torch.Generator().manual_seed(3)
    x, y = torch.randint(0, 256, (40, 1, 8, 8), dtype=torch.uint8, generator=gen), torch.arange(40) % 4
    learner = Learner(Counting(), memory=2, recipe=Recipe(epochs=2, batch=8))
    for part in (y < 2, y >= 2):
        learner.learn(x[part], y[part], lambda one: one.save(tmp_path / "half"))
    assert learner.state_.extra["count"].item() == 40


def test_the_record_says_how_the_classifier_was_finetuned(tmp_path: Any) -> None:
    def stages(method: Method, memory: str, base: int | None = None) -> list[dict[str, Any]]:
        one = Run(method, Data("digits"), Protocol(base, 1, memory=memory), Recipe(epochs=1))
        return run(one, tmp_path / f"{method.remedy.name}-{memory}", Machine("cpu"))["resolved"]["stages"]

    first, later = stages(PODNet(), "2")
    assert first["from"] == 0 and first["stages"][0]["name"] == "train" and first["stages"][1:] == ["choose"]
    assert later["from"] == 1 and later["stages"][:2] == first["stages"]
    (refit,) = later["stages"][2:]
    assert (refit["name"], refit["images"], refit["batch_norm"], refit["teacher"]) == (
        "refit", "memory", "train", "previous",
    )  # fmt: skip
    assert (refit["recipe"]["epochs"], refit["recipe"]["lr"], refit["recipe"]["clamp"]) == (20, 0.05, 5.0)
    assert refit["groups"][0]["names"] == ["head.weight", "head.bias", "head.old", "head.new"]
    for method, memory in ((PODNet(Balanced()), "2"), (PODNet(), "0"), (PODNet(), "total:5")):
        (alone,) = stages(method, memory)
        assert alone["from"] == 0 and len(alone["stages"]) == 2, "nothing to fine-tune on, or no need to"
