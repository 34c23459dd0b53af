"""The decoder runtime against transformers, and against itself in other batches."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiny_models import write_random_llama, write_random_model
from tierspec.errors import SettingError
from tierspec.models import CacheFull, Decoder, Route, Step
from tierspec.models.ops import NativeOps, ReferenceOps

FULL = Route()
VARIANTS = {
    "tied, grouped heads": {},
    "untied, head_dim 32, one head per group": {
        "tie_word_embeddings": False,
        "head_dim": 32,
        "num_key_value_heads": 6,
        "rope_theta": 50000.0,
    },
    "head_dim 64": {"head_dim": 64, "num_attention_heads": 3, "num_key_value_heads": 1},
    "head_dim 128, six heads per group": {"head_dim": 128, "num_attention_heads": 12, "num_key_value_heads": 2},
    "qwen2": {"family": "qwen2"},
    "qwen2, sharded": {"family": "qwen2", "tie_word_embeddings": False, "shard_size": "60KB"},
    "qwen3": {"family": "qwen3", "head_dim": 16},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 5000.0,
        },
    },
    "yarn": {
        "family": "qwen3",
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "rope_theta": 10000.0,
        },
    },
}


def token_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@functools.cache
def tiny_decoder(dtype: torch.dtype = torch.float32) -> Decoder:
    directory = Path(tempfile.mkdtemp(prefix="tierspec-tiny-"))
    write_random_llama(directory)
    return Decoder.from_directory(directory, dtype=dtype)


def run(decoder: Decoder, ids: list[int], *, route: Route = FULL) -> torch.Tensor:
    cache = decoder.new_cache(len(ids), route)
    return decoder.forward([Step(cache.sequence(), ids)], cache, route=route).last


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("ops", ["native", "reference"])
def test_logits_and_features_equal_transformers(tmp_path: Path, overrides: dict, ops: str) -> None:
    model = write_random_model(tmp_path, **{"family": "llama", **overrides})
    decoder = Decoder.from_directory(tmp_path, dtype=torch.float32)
    if ops == "reference":
        decoder._ops = ReferenceOps()
    ids = token_ids(150)
    with torch.no_grad():
        expected = model(torch.tensor([ids]), output_hidden_states=True)
    cache = decoder.new_cache(192)
    hidden = decoder.forward([Step(cache.sequence(), ids)], cache, features=(1, 2, 3))
    torch.testing.assert_close(decoder.logits(hidden.last), expected.logits[0], atol=1e-4, rtol=1e-5)
    for index, feature in hidden.features.items():
        torch.testing.assert_close(feature, expected.hidden_states[index][0], atol=1e-4, rtol=1e-5)


def test_kernels_are_the_compiled_ones_here() -> None:
    assert isinstance(tiny_decoder()._ops, NativeOps)


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=6),
)
def test_invariant_numerics_any_split_any_batch(data: st.DataObject, dtype: torch.dtype, lengths: list[int]) -> None:
    """Sequences are fed in random pieces, in random company; every row must equal the row of one undisturbed pass."""
    decoder = tiny_decoder(dtype)
    texts = [token_ids(n, seed) for seed, n in enumerate(lengths)]
    expected = [run(decoder, ids) for ids in texts]
    cache = decoder.new_cache(sum(lengths) + 64 * len(lengths))
    sequences = [cache.sequence() for _ in texts]
    while unfinished := [i for i, s in enumerate(sequences) if s.length < lengths[i]]:
        chosen = data.draw(st.lists(st.sampled_from(unfinished), min_size=1, unique=True))
        steps = []
        for i in chosen:
            left = lengths[i] - sequences[i].length
            count = data.draw(st.sampled_from([1, min(2, left), min(9, left), left]))
            steps.append(Step(sequences[i], texts[i][sequences[i].length : sequences[i].length + count]))
        starts = [step.sequence.length for step in steps]
        rows = decoder.forward(steps, cache).last
        for i, start, step in zip(chosen, starts, steps, strict=True):
            here, rows = rows[: len(step.token_ids)], rows[len(step.token_ids) :]
            assert torch.equal(here, expected[i][start : start + len(step.token_ids)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_a_row_do_not_depend_on_the_other_rows(dtype: torch.dtype) -> None:
    decoder = tiny_decoder(dtype)
    hidden = run(decoder, token_ids(130))
    together = decoder.logits(hidden)
    for count in (1, 2, 7, 33, 65, 100):
        assert torch.equal(decoder.logits(hidden[-count:]), together[-count:])


def test_after_rollback_the_rolled_back_never_happened() -> None:
    decoder = tiny_decoder()
    kept, wrong, right = token_ids(60, 1), token_ids(70, 2), token_ids(70, 3)
    cache = decoder.new_cache(256)
    sequence = cache.sequence()
    decoder.forward([Step(sequence, kept)], cache)
    free = cache.free_tokens
    decoder.forward([Step(sequence, wrong)], cache)
    sequence.truncate(60)
    assert cache.free_tokens == free
    after = decoder.forward([Step(sequence, right)], cache).last
    assert torch.equal(after, run(decoder, kept + right)[60:])


def test_a_full_cache_changes_nothing() -> None:
    decoder = tiny_decoder()
    cache = decoder.new_cache(192)
    first, second = cache.sequence(), cache.sequence()
    decoder.forward([Step(first, token_ids(60))], cache)
    with pytest.raises(CacheFull):
        decoder.forward([Step(first, token_ids(5)), Step(second, token_ids(129))], cache)
    assert (first.length, second.length, cache.free_tokens) == (60, 0, 128)
    assert torch.equal(
        decoder.forward([Step(first, token_ids(4, 5))], cache).last, run(decoder, token_ids(60) + token_ids(4, 5))[60:]
    )


class TestRoute:
    def test_keeping_everything_is_the_full_model(self) -> None:
        decoder = tiny_decoder()
        assert torch.equal(run(decoder, token_ids(40), route=Route()), run(decoder, token_ids(40)))

    def test_equals_a_model_whose_skipped_sublayers_add_nothing(self, tmp_path: Path) -> None:
        route = Route(attention=frozenset({1, 2}), mlp=frozenset({2, 3}))
        model = write_random_llama(tmp_path)
        decoder = Decoder.from_directory(tmp_path, dtype=torch.float32)
        with torch.no_grad():
            for i in route.attention:
                model.model.layers[i].self_attn.o_proj.weight.zero_()
            for i in route.mlp:
                model.model.layers[i].mlp.down_proj.weight.zero_()
            expected = model(torch.tensor([token_ids(80)]), output_hidden_states=True)
        cache = decoder.new_cache(128, route)
        assert cache.keys.shape[0] == 2
        hidden = decoder.forward([Step(cache.sequence(), token_ids(80))], cache, route=route, features=(2, 3))
        torch.testing.assert_close(decoder.logits(hidden.last), expected.logits[0], atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(hidden.features[3], expected.hidden_states[3][0], atol=1e-4, rtol=1e-5)
        assert torch.equal(hidden.features[2], hidden.features[3])

    def test_a_cache_belongs_to_one_route(self) -> None:
        decoder = tiny_decoder()
        cache = decoder.new_cache(64, Route(attention=frozenset({0})))
        with pytest.raises(ValueError, match="another route"):
            decoder.forward([Step(cache.sequence(), [3])], cache)

    def test_unknown_layers_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"layers \[9\]"):
            tiny_decoder().new_cache(64, Route(mlp=frozenset({9})))


@pytest.mark.parametrize("index", [0, 4, -1])
def test_the_embedding_and_the_last_entry_are_no_features(index: int) -> None:
    decoder = tiny_decoder()
    cache = decoder.new_cache(64)
    with pytest.raises(SettingError, match=r"drafter\.feature_layers"):
        decoder.forward([Step(cache.sequence(), [3])], cache, features=(index,))


def test_positions_beyond_the_context_are_refused() -> None:
    decoder = tiny_decoder()
    cache = decoder.new_cache(1024)
    with pytest.raises(ValueError, match="beyond the model's context"):
        decoder.forward([Step(cache.sequence(), token_ids(513))], cache)
