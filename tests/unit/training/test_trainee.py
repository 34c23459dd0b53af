import copy
import itertools
from dataclasses import replace

import pytest
import torch

from tests.support.drafters import DEPTH, FAMILIES, drafter_of, lone_anchor, random_trainee, tiny_decoder
from tierspec.config import ObjectiveSettings, TrainingSettings
from tierspec.models import Decoder, Step
from tierspec.training.data import Sample, sample_anchors, token_counts
from tierspec.training.features import FeatureRequest, TargetFeatures
from tierspec.training.objective import vat_loss
from tierspec.training.optimizer import GroupClippedAdamW
from tierspec.training.token_view import token_view, walked_blocks
from tierspec.training.trainee import AnchorBatch, Trainee
from tierspec.training.walk import walk

PROMPTS, RESPONSES = (3, 9, 5), (12, 2, 30)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("target"))


def greedy_text(decoder: Decoder, prompt: list[int], count: int) -> list[int]:
    cache = decoder.new_cache(512)
    sequence, tokens, out = cache.sequence(), prompt, []
    for _ in range(count):
        hidden = decoder.forward([Step(sequence, tokens)], cache)
        tokens = decoder.logits(hidden.last[-1:]).argmax(-1).tolist()
        out += tokens
    return out


@pytest.fixture(scope="module")
def samples(decoder: Decoder) -> list[Sample]:
    g = torch.Generator().manual_seed(5)
    made = []
    for i, (p, r) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        prompt = torch.randint(3, 97, (p,), generator=g).tolist()
        made.append(Sample(f"s{i}", tuple(prompt), tuple(greedy_text(decoder, prompt, r))))
    return made


def features_for(decoder: Decoder, trainee: Trainee) -> TargetFeatures:
    return TargetFeatures(decoder, trainee.feature_layers, max_length=128, cache_bytes=1 << 20)


def batch_of(decoder: Decoder, trainee: Trainee, samples: list[Sample], count: int = 100) -> AnchorBatch:
    features = features_for(decoder, trainee)
    captured = features([FeatureRequest(i, s.token_ids, s.first_anchor) for i, s in enumerate(samples)])
    return trainee.collate(samples, captured, [sample_anchors(s, count, (0, i)) for i, s in enumerate(samples)])


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
def test_features_are_the_targets_and_depend_on_the_sequence_alone(
    decoder: Decoder, samples: list[Sample], numerics: str
) -> None:
    decoder = copy.copy(decoder)
    decoder.numerics = numerics
    features = TargetFeatures(decoder, (1, 2), max_length=128, cache_bytes=1 << 20)
    requests = [FeatureRequest(i, s.token_ids, s.first_anchor) for i, s in enumerate(samples)]
    together = features([*requests, requests[0]])
    assert together[-1] is together[0]
    for sample, request, got in zip(samples, requests, together[:-1], strict=True):
        cache = decoder.new_cache(128)
        hidden = decoder.forward([Step(cache.sequence(), sample.token_ids)], cache, features=(1, 2))
        assert torch.equal(got.captured, torch.cat((hidden.features[1], hidden.features[2]), -1))
        assert torch.equal(got.last, hidden.last)
        assert got.top_ids[sample.first_anchor : -1].tolist() == list(sample.response_ids)
        assert (got.top_ids[: sample.first_anchor] == -1).all()
        assert features([request])[0] is got
    known = TargetFeatures(decoder, (1, 2), max_length=128)([replace(request, greedy=True) for request in requests])
    for theirs, got in zip(known, together, strict=False):
        assert torch.equal(theirs.top_ids[:-1], got.top_ids[:-1]) and torch.equal(theirs.last, got.last)


def test_sequences_share_forward_passes_as_far_as_the_cache_goes(decoder: Decoder) -> None:
    lengths = [100] * 40 + [3] * 5
    requests = [FeatureRequest(i, [1 + i % 90] * n, n) for i, n in enumerate(lengths)]
    for request, got in zip(requests, TargetFeatures(decoder, (1,), max_length=100)(requests), strict=True):
        (alone,) = TargetFeatures(decoder, (1,), max_length=100)([request])
        assert torch.equal(got.captured, alone.captured) and torch.equal(got.last, alone.last)


def test_the_feature_cache_keeps_to_its_size(decoder: Decoder, samples: list[Sample]) -> None:
    requests = [FeatureRequest(i, s.token_ids, 0) for i, s in enumerate(samples)]
    sizes = [found.nbytes for found in TargetFeatures(decoder, (1,), max_length=128)(requests)]
    features = TargetFeatures(decoder, (1,), max_length=128, cache_bytes=sizes[0] + sizes[1])
    first, again = features(requests), features(requests)
    assert [a is b for a, b in zip(first, again, strict=True)] == [True, True, False]


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_equals_an_unbatched_reference(decoder: Decoder, samples: list[Sample], family: str) -> None:
    trainee = random_trainee(decoder, family=family)
    loss, monitors = trainee(batch_of(decoder, trainee, samples))

    draft, target, labels, survival, valid = [], [], [], [], []
    for sample in samples:
        ids = sample.token_ids
        features = features_for(decoder, trainee)([FeatureRequest(0, ids, 0)])[0]
        logits = decoder.logits(features.last)
        for p in range(sample.first_anchor, len(ids) - 2):
            k_valid = [p + 2 + k < len(ids) for k in range(DEPTH)]
            alone = lone_anchor(features.captured, [*ids[1:], *[0] * (DEPTH + 1)], p)
            hidden = trainee.unroll(alone)[0, 0]
            draft.append(hidden @ trainee.token_head().T)
            survival.append(trainee.verification_head(hidden)[:, 0])
            rows = [min(p + 1 + k, len(ids) - 1) for k in range(DEPTH)]
            target.append(logits[rows])
            labels.append(torch.tensor([ids[p + 2 + k] if ok else 0 for k, ok in enumerate(k_valid)]))
            valid.append(torch.tensor(k_valid))
    expected, reference_monitors = vat_loss(
        torch.stack(draft),
        torch.stack(target),
        torch.stack(labels),
        torch.stack(survival),
        torch.stack(valid),
        ObjectiveSettings(),
        target_ids=trainee.vocabulary.target_ids,
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert monitors.scalars() == pytest.approx(reference_monitors.scalars(), rel=1e-4, abs=1e-5)

    parameters = list(trainee.parameters())
    ours, theirs = torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters)
    for ours_p, theirs_p in zip(ours, theirs, strict=True):
        torch.testing.assert_close(ours_p, theirs_p, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_losses_reach_the_first_layer(decoder: Decoder, samples: list[Sample], family: str) -> None:
    trainee = random_trainee(decoder, family=family)
    trainee(batch_of(decoder, trainee, samples))[0].backward()
    norms = trainee.take_gradient_norms()
    assert norms.keys() == {"token", "head"} and min(norms.values()) > 0
    assert trainee.take_gradient_norms() == {}
    only_head = random_trainee(decoder, family=family)
    batch = batch_of(decoder, only_head, samples)
    only_head.verification_head(only_head.states(batch)).sum().backward()
    assert only_head.drafter.fc.weight.grad is not None and only_head.drafter.fc.weight.grad.any()


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_products_stay_near_fp32(decoder: Decoder, samples: list[Sample], family: str) -> None:
    losses = []
    for precision in ("fp32", "bf16"):
        trainee = random_trainee(decoder, family=family, precision=precision, std=0.05)
        loss, _ = trainee(batch_of(decoder, trainee, samples))
        loss.backward()
        losses.append(loss.item())
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in trainee.parameters() if p.grad is not None)
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_initialisation_copies_what_the_target_knows(decoder: Decoder) -> None:
    trainee = random_trainee(decoder)
    trainee.initialize_from_target(decoder)
    drafter, last = trainee.drafter, decoder.layer_weights(3)
    assert torch.equal(drafter.lm_head.weight, decoder.embedding[trainee.vocabulary.target_ids])
    assert torch.equal(drafter.layer.self_attn.q_proj.weight[:, 48:], last["self_attn.q_proj.weight"])
    assert drafter.layer.self_attn.q_proj.weight[:, :48].abs().max() < 0.02
    features = torch.randn(5, 96)
    assert torch.equal(drafter.fc(features), features[:, 48:])
    assert torch.equal(drafter.norm.weight, decoder.final_norm)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_teaches_the_drafter_the_text(decoder: Decoder, samples: list[Sample], family: str) -> None:
    trainee = random_trainee(decoder, family=family, counts=token_counts(samples, decoder.config.vocab_size))
    trainee.initialize_from_target(decoder)
    batch, features = batch_of(decoder, trainee, samples), features_for(decoder, trainee)
    settings = TrainingSettings(learning_rate=1e-2, gradient_clip=1.0)
    optimizer = GroupClippedAdamW(trainee.parameter_groups(), settings)
    before = walk(drafter_of(trainee, decoder), features, samples, DEPTH)
    for _ in range(40):
        optimizer.zero_grad()
        loss, monitors = trainee(batch)
        loss.backward()
        optimizer.step()
    after = walk(drafter_of(trainee, decoder), features, samples, DEPTH)
    assert monitors.scalars()["accept_len"] > 2.5
    assert after.accept_len > before.accept_len + 0.5


def test_a_view_of_a_sample_shows_where_verification_stops(decoder: Decoder, samples: list[Sample]) -> None:
    trainee = random_trainee(decoder, counts=token_counts(samples, decoder.config.vocab_size))
    trainee.initialize_from_target(decoder)
    sample, features = samples[2], features_for(decoder, trainee)
    (found,) = features([FeatureRequest(0, sample.token_ids, sample.first_anchor)])
    view = token_view(trainee, found, sample)
    walked = walked_blocks(view)
    assert walked[0]["anchor"] == len(sample.prompt_ids)
    assert all(b["anchor"] == a["anchor"] + a["survived"] + 1 for a, b in itertools.pairwise(walked))
    assert any(block["survived"] for block in view["blocks"])
    assert view["supervised_from"] == len(sample.prompt_ids) + 1
    assert [block["anchor"] for block in view["blocks"]] == list(
        range(len(sample.prompt_ids), len(sample.token_ids) - 1)
    )
    for block in view["blocks"]:
        following = list(sample.token_ids[block["anchor"] + 1 :])[: block["survived"] + 1]
        assert following[: block["survived"]] == block["drafted"][: block["survived"]]
        assert block["survived"] == len(block["drafted"]) or following[-1] != block["drafted"][block["survived"]]
        assert all(0 < belief < 1 for belief in block["belief"]) and len(block["belief"]) == len(block["drafted"])
