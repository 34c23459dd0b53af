from pathlib import Path

import pytest
import torch

from tests.support.drafters import tiny_decoder
from tierspec.errors import ArtifactError, SettingError
from tierspec.models import Decoder
from tierspec.training.feature_store import FeatureStore, from_bytes, store_bytes, to_bytes
from tierspec.training.features import FeatureRequest, SequenceFeatures, TargetFeatures

REQUESTS = [FeatureRequest(i, [3 + i % 7] * (4 + i % 5), 2) for i in range(70)]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("target"))


def features_of(decoder: Decoder) -> TargetFeatures:
    return TargetFeatures(decoder, (1, 2), max_length=64, with_normaliser=True)


def same(a: SequenceFeatures, b: SequenceFeatures) -> bool:
    names = ("captured", "last", "top_ids", "log_normaliser")
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)


def test_what_was_stored_is_read_back(decoder: Decoder, tmp_path: Path) -> None:
    features = features_of(decoder)
    store = FeatureStore(tmp_path, {"target": "tiny"})
    assert store.missing(len(REQUESTS)) == [0, 1, 2]
    store.fill(features, REQUESTS, [0, 2])
    assert store.missing(len(REQUESTS)) == [1]
    store.fill(features, REQUESTS, [1])
    asked = [REQUESTS[i] for i in (69, 0, 40, 0)]
    for found, fresh in zip(store(asked), features(asked), strict=True):
        assert same(found, fresh)
    again = FeatureStore(tmp_path, {"target": "tiny"})
    assert again.missing(len(REQUESTS)) == [] and same(again(asked)[0], store(asked)[0])
    assert FeatureStore(tmp_path, {"target": "other"}).missing(1) == [0]


def test_other_sequences_and_broken_shards_are_named(decoder: Decoder, tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, {})
    store.fill(features_of(decoder), REQUESTS[:3], [0])
    with pytest.raises(ArtifactError, match="holds other tokens for sequence 1"):
        store([FeatureRequest(1, [9, 9], 0)])
    with pytest.raises(ArtifactError, match=r"features-00001\.safetensors is missing or corrupt"):
        store([FeatureRequest(40, [9, 9], 0)])
    (path,) = store.directory.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ArtifactError, match="missing or corrupt"):
        FeatureStore(tmp_path, {})(REQUESTS[:1])


def test_bytes_are_of_the_requests_they_were_made_for(decoder: Decoder) -> None:
    features = features_of(decoder)
    data = to_bytes(REQUESTS[:2], features(REQUESTS[:2]))
    assert all(same(a, b) for a, b in zip(from_bytes(REQUESTS[:2], data), features(REQUESTS[:2]), strict=True))
    with pytest.raises(ArtifactError, match="other sequences than 2"):
        from_bytes(REQUESTS[1:3], data)


def test_features_that_are_not_finite_are_refused(decoder: Decoder) -> None:
    (found,) = features_of(decoder)(REQUESTS[:1])
    found.last[0, 0] = float("nan")
    with pytest.raises(SettingError, match="of sequence 0 are not finite"):
        to_bytes(REQUESTS[:1], [found])


def test_the_estimate_is_what_the_tensors_take(decoder: Decoder) -> None:
    features = TargetFeatures(decoder, (1, 2), max_length=64)(REQUESTS)
    tokens = sum(len(request.token_ids) for request in REQUESTS)
    assert store_bytes(tokens, 2, 48, 4) == sum(found.nbytes for found in features) + 8 * tokens
