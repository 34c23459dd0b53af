import pytest
import torch

from tierspec.models import Step


@pytest.fixture(scope="module")
def expected(exact_target, prompts):
    """transformers' logits of a prompt, fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(exact_target.path, dtype=torch.float32, local_files_only=True).eval()
    with torch.inference_mode():
        return model(torch.tensor([prompts[0]])).logits[0]


@pytest.mark.parametrize("block", [1, 8, 1000])
def test_logits_equal_those_of_transformers(exact_target, prompts, expected, block):
    decoder, ids = exact_target.decoder, prompts[0]
    cache = decoder.new_cache(len(ids))
    sequence = cache.sequence()
    blocks = [ids[start : start + block] for start in range(0, len(ids), block)]
    logits = torch.cat([decoder.logits(decoder.forward([Step(sequence, part)], cache).last) for part in blocks])
    assert (logits - expected).abs().max() <= 1e-4


def test_bf16_logits_do_not_depend_on_the_company(target, prompts):
    decoder = target.decoder
    cache = decoder.new_cache(sum(len(ids) + 64 for ids in prompts) + len(prompts[0]) + 64)
    together = decoder.forward([Step(cache.sequence(), ids) for ids in prompts], cache).last
    alone = cache.sequence()
    rows = torch.cat([decoder.forward([Step(alone, [token])], cache).last for token in prompts[0]])
    assert torch.equal(together[: len(rows)], rows)
    assert torch.equal(decoder.logits(together)[: len(rows)], decoder.logits(rows))
