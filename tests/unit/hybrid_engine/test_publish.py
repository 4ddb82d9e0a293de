"""The publisher in a world of one: checks before writing, atomicity, metrics."""

from __future__ import annotations

import pytest
import torch

from hybridflow.engines.rollout.base import EngineParameters, Part
from hybridflow.engines.train.base import Shard
from hybridflow.hybrid_engine.publish import NO_VERSION, Publisher
from hybridflow.utils.errors import EngineError

EMBED, HEAD, WEIGHT = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.weight"


class Sides:
    """A trainer and a generator of one process, with what the generator was told."""

    def __init__(self, *, rollout_dtype=torch.float32, generated=(EMBED, WEIGHT)):
        generator = torch.Generator().manual_seed(0)
        self.full = {EMBED: torch.randn(6, 4, generator=generator), WEIGHT: torch.randn(8, 4, generator=generator)}
        self.storage = {
            name: torch.zeros_like(self.full.get(name, self.full[EMBED]), dtype=rollout_dtype) for name in generated
        }
        self.told: list[int] = []

    def shards(self):
        return [Shard(n, t, tuple((0, s) for s in t.shape), tuple(t.shape)) for n, t in self.full.items()]

    def parameters(self):
        return EngineParameters(
            tuple(Part(n, t, tuple((0, s) for s in t.shape), tuple(t.shape)) for n, t in self.storage.items())
        )

    def written(self, version):
        self.told.append(version)

    def publisher(self, **settings):
        return Publisher(self.shards, self.parameters, self.written, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_process_copies_in_place_and_sends_nothing(dtype):
    sides = Sides(rollout_dtype=dtype)
    metrics = sides.publisher(verify="always").publish(3)
    for name, full in sides.full.items():
        assert torch.equal(sides.storage[name], full.to(dtype))
    assert metrics["publish/bytes"] == metrics["publish/peak_extra_bytes"] == metrics["publish/bound_bytes"] == 0
    assert metrics["publish/local_bytes"] == sum(t.numel() for t in sides.full.values()) * dtype.itemsize
    assert sides.told == [NO_VERSION, 3]


def test_every_misfit_is_named_with_both_shapes_before_anything_is_written():
    sides = Sides(generated=(EMBED, WEIGHT, HEAD))
    sides.full[WEIGHT] = torch.randn(8, 5)
    sides.full["model.norm.weight"] = torch.randn(4)
    publisher = sides.publisher()
    with pytest.raises(EngineError) as caught:
        publisher.publish(0)
    text = str(caught.value)
    assert f"missing: the generator needs {HEAD} [6, 4]" in text
    assert "extra: the trainer owns model.norm.weight [4]" in text
    boxes = "trainer rank 0 holds ((0, 8), (0, 5)), generator rank 0 holds ((0, 8), (0, 4))"
    assert f"shape: {WEIGHT} is [8, 5] in the trainer and [8, 4] in the generator ({boxes})" in text
    assert "nothing was written" in text
    assert all(not tensor.any() for tensor in sides.storage.values())
    assert sides.told == []


def test_a_misfit_after_a_good_publish_leaves_the_generator_its_version():
    sides = Sides()
    publisher = sides.publisher()
    publisher.publish(0)
    before = {name: tensor.clone() for name, tensor in sides.storage.items()}
    sides.full = {EMBED: torch.ones(6, 4), WEIGHT: torch.ones(4, 8)}
    with pytest.raises(EngineError, match="shape: "):
        publisher.publish(1)
    assert publisher.version == 0
    assert sides.told == [NO_VERSION, 0]
    assert all(torch.equal(sides.storage[name], before[name]) for name in before)


def test_a_trainer_that_holds_only_half_of_a_parameter_is_refused():
    sides = Sides()
    half = [Shard(EMBED, sides.full[EMBED][:3], ((0, 3), (0, 4)), (6, 4)), sides.shards()[1]]
    with pytest.raises(
        EngineError, match=r"incomplete: the trainer's ranks hold 12 of 24 elements of model.embed_tokens"
    ):
        Publisher(lambda: half, sides.parameters, sides.written).publish(0)


def test_a_shard_whose_tensor_is_not_its_box_is_refused():
    sides = Sides()
    wrong = [Shard(EMBED, sides.full[EMBED][:3], ((0, 6), (0, 4)), (6, 4)), sides.shards()[1]]
    with pytest.raises(EngineError, match=r"trainer rank 0 stores model.embed_tokens.weight as \[3, 4\]"):
        Publisher(lambda: wrong, sides.parameters, sides.written).publish(0)


def test_a_generator_of_another_dtype_than_agreed_is_refused():
    sides = Sides(rollout_dtype=torch.float16)
    with pytest.raises(EngineError, match=r"dtype: the generator stores .* as float16, not torch.bfloat16"):
        sides.publisher(rollout_dtype="bf16").publish(0)
    Sides(rollout_dtype=torch.bfloat16).publisher(rollout_dtype="bf16").publish(0)


def test_a_failure_midway_leaves_no_version_and_the_next_publish_succeeds():
    sides = Sides()
    publisher = sides.publisher()
    publisher.publish(0)
    good = sides.full[WEIGHT]
    sides.full = {
        EMBED: sides.full[EMBED] + 1,
        WEIGHT: good.to("meta"),
    }  # copying out of it fails after EMBED was written
    with pytest.raises(EngineError, match="while moving weights; the generators hold no version") as caught:
        publisher.publish(1)
    assert isinstance(caught.value.__cause__, NotImplementedError)
    assert publisher.version == NO_VERSION
    assert sides.told == [NO_VERSION, 0, *3 * [NO_VERSION]]
    sides.full[WEIGHT] = good + 1
    publisher.publish(2)
    assert sides.told[-2:] == [NO_VERSION, 2]
    assert torch.equal(sides.storage[WEIGHT], good + 1)


def test_a_generator_that_cannot_clear_its_caches_holds_no_version():
    sides = Sides()
    refuse = [True]

    def written(version):
        sides.told.append(version)
        if version >= 0 and refuse.pop():
            raise EngineError("the prefix cache was not reset")

    publisher = Publisher(sides.shards, sides.parameters, written, attempts=1)
    with pytest.raises(EngineError, match="the prefix cache was not reset"):
        publisher.publish(0)
    assert sides.told == [NO_VERSION, 0, NO_VERSION]
    refuse.append(False)
    publisher.publish(1)
    assert publisher.version == 1


def test_a_trainer_that_cannot_give_its_shards_changes_nothing():
    sides = Sides()

    def shards():
        raise RuntimeError("parameters are unsharded")

    with pytest.raises(
        EngineError, match="cannot start; nothing was written\nrank 0: RuntimeError: parameters are unsharded"
    ):
        Publisher(shards, sides.parameters, sides.written).publish(0)
    assert sides.told == []


def test_a_generator_with_a_head_of_its_own_gets_the_tied_embedding_twice():
    sides = Sides(generated=(EMBED, WEIGHT, HEAD))
    sides.publisher(tied={HEAD: EMBED}, verify="always").publish(0)
    assert torch.equal(sides.storage[HEAD], sides.full[EMBED])
    assert torch.equal(sides.storage[EMBED], sides.full[EMBED])


def test_a_generator_that_knows_only_the_tied_head_is_fed_from_the_embedding():
    sides = Sides(generated=(HEAD, WEIGHT))
    sides.publisher(tied={HEAD: EMBED}).publish(0)
    assert torch.equal(sides.storage[HEAD], sides.full[EMBED])


def test_transposed_storage_and_shards_are_copied_as_they_are_seen():
    sides = Sides()
    sides.storage[WEIGHT] = torch.zeros(4, 8).T
    sides.full[EMBED] = torch.randn(4, 6).T
    sides.publisher(verify="always").publish(0)
    assert torch.equal(sides.storage[WEIGHT], sides.full[WEIGHT])
    assert torch.equal(sides.storage[EMBED], sides.full[EMBED])


def test_two_parameters_in_one_storage_are_found_by_the_checksums():
    sides = Sides(generated=(EMBED, HEAD))
    sides.full = {EMBED: sides.full[EMBED], HEAD: sides.full[EMBED] + 1}
    sides.storage[HEAD] = sides.storage[EMBED]
    with pytest.raises(EngineError, match=f"(?s)comparing checksums.*{EMBED}.*on generator rank 0"):
        sides.publisher().publish(0)
    assert set(sides.told) == {NO_VERSION}
    sides.publisher(verify="never").publish(0)


@pytest.mark.parametrize(("verify", "finds"), [("first", False), ("always", True), ("never", False)])
def test_checksums_are_compared_as_often_as_chosen(verify, finds):
    sides = Sides(generated=(EMBED, HEAD))
    sides.full = {EMBED: sides.full[EMBED], HEAD: sides.full[EMBED].clone()}
    sides.storage[HEAD] = sides.storage[EMBED]  # one storage: right only while both hold the same
    publisher = sides.publisher(verify=verify)
    publisher.publish(0)
    sides.full[HEAD] += 1
    if finds:
        with pytest.raises(EngineError, match="comparing checksums"):
            publisher.publish(1)
    else:
        publisher.publish(1)


@pytest.mark.parametrize("verify", ["first", "always"])
def test_weights_that_changed_by_themselves_stop_the_next_publish_and_the_one_after_it_succeeds(verify):
    sides = Sides()
    publisher = sides.publisher(verify=verify)
    publisher.publish(0)
    sides.storage[WEIGHT][2, 3] += 1
    if verify == "first":
        publisher.publish(1)
        return
    with pytest.raises(EngineError, match="changed since the last publish, and not by one") as caught:
        publisher.publish(1)
    [line] = str(caught.value).splitlines()[1:]
    assert line.startswith(f"{WEIGHT} ((0, 8), (0, 4)) on generator rank 0: checksum ")
    assert publisher.version == NO_VERSION and sides.told[-1] == NO_VERSION
    publisher.publish(2)
    assert torch.equal(sides.storage[WEIGHT], sides.full[WEIGHT])
    publisher.publish(3)


def test_an_unknown_verify_mode_is_refused():
    with pytest.raises(EngineError, match="verify='sometimes' is unknown: use first, always or never"):
        Sides().publisher(verify="sometimes")


@pytest.mark.parametrize(("verify", "finds"), [("first", False), ("always", True)])
def test_copies_that_the_generator_computes_with_are_asked_for_after_it_was_told(verify, finds):
    sides = Sides()
    line, asked = f"{WEIGHT} ((0, 8), (0, 4)): the engine's packed copy is not of the weights that it holds", []

    def stale():
        asked.append(sides.told[-1])
        return [line] if planted else []

    publisher = sides.publisher(verify=verify, attempts=1, stale_copies=stale)
    planted = False
    publisher.publish(0)
    assert asked == [0]  # not before: copies follow when the generator is told
    planted = True
    if finds:
        with pytest.raises(EngineError, match="while comparing packed copies") as caught:
            publisher.publish(1)
        assert f"{line} on generator rank 0" in str(caught.value)
        assert publisher.version == NO_VERSION and sides.told[-1] == NO_VERSION
    else:
        publisher.publish(1)
        assert asked == [0]


def test_a_copy_that_is_fresh_at_the_second_try_is_taken():
    sides = Sides()
    answers = [["a.weight: stale"], []]
    metrics = sides.publisher(stale_copies=lambda: answers.pop(0)).publish(5)
    assert metrics["publish/retries"] == 1 and sides.told == [NO_VERSION, 5, NO_VERSION, 5]
