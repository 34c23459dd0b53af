import pytest

from tests.support.target_drafters import OracleDrafter
from tierspec.decoding import DraftOptions, SamplingParams, generate
from tierspec.drafters import load_drafter
from tierspec.drafters.routing import RouterRule

NEW_TOKENS = 32
SAMPLINGS = {
    "greedy": SamplingParams(NEW_TOKENS, seed=1),
    "sampled": SamplingParams(NEW_TOKENS, temperature=0.8, top_k=50, top_p=0.95, seed=1),
}


@pytest.fixture(scope="module")
def alone(target, prompts):
    """What plain decoding of one prompt at a time gives, in bf16."""
    return {
        kind: [generate(target, [ids], sampling=sampling)[0].token_ids for ids in prompts]
        for kind, sampling in SAMPLINGS.items()
    }


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("source", ["none", "suffix", "neural", "auto"])
def test_batches_and_drafts_leave_the_text_as_it_is(target, drafter_path, prompts, alone, kind, source):
    drafter = load_drafter(drafter_path, target)
    draft = DraftOptions(source=source, rule=RouterRule("match", 2))
    answers = generate(target, prompts, drafter=drafter, sampling=SAMPLINGS[kind], draft=draft)
    assert [answer.token_ids for answer in answers] == alone[kind]
    assert (sum(answer.stats.drafted for answer in answers) > 0) is (source != "none")


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_a_drafter_that_is_mostly_right_shortens_the_work_and_not_the_text(target, prompts, alone, kind):
    texts = [ids + answer for ids, answer in zip(prompts, alone[kind], strict=True)]
    answers = generate(target, prompts, drafter=OracleDrafter(target, texts), sampling=SAMPLINGS[kind])
    assert [answer.token_ids for answer in answers] == alone[kind]
    assert min(answer.stats.accept_len for answer in answers) > 2


def test_fp32_too(exact_target, drafter_path, prompts):
    drafter = load_drafter(drafter_path, exact_target)
    sampling = SAMPLINGS["greedy"]
    plain = generate(exact_target, prompts[:2], sampling=sampling)
    drafted = generate(exact_target, prompts[:2], drafter=drafter, sampling=sampling, draft=DraftOptions(source="auto"))
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
