import pytest
import torch

from tierspec.config import ObjectiveSettings
from tierspec.training.objective import adaptive_weights, vat_loss

N, K, V = 6, 5, 17


def blocks(seed: int = 0, vocab: int = V, columns: int = V) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    target = torch.randn(N, K, vocab, generator=g, dtype=torch.float64)
    return {
        "draft_logits": torch.randn(N, K, columns, generator=g, dtype=torch.float64),
        "target_logits": target,
        "labels": target.argmax(-1),
        "survival_logits": torch.randn(N, K, generator=g, dtype=torch.float64),
        "valid": torch.ones(N, K, dtype=torch.bool),
    }


def test_formula_of_one_block_by_hand() -> None:
    data = blocks(1)
    data = {name: tensor[:1] for name, tensor in data.items()}
    data["draft_logits"] = data["target_logits"].roll(1, -1)
    data["draft_logits"][0, 0] = data["target_logits"][0, 0]
    settings = ObjectiveSettings(decay=0.8, head_beta=0.5)
    loss, _ = vat_loss(**data, settings=settings)

    log_q = data["draft_logits"][0].log_softmax(-1)
    p = data["target_logits"][0].softmax(-1)
    expected = 0.0
    for k, (weight, label) in enumerate(zip([1, 1, 0.8, 0.64, 0.512], [1, 0, 0, 0, 0], strict=True)):
        expected += weight * (-(p[k] * log_q[k]).sum() - log_q[k, data["labels"][0, k]])
        s = data["survival_logits"][0, k]
        expected += 0.5 / K * (-torch.log(torch.sigmoid(s if label else -s)))
    assert loss.item() == pytest.approx(float(expected) / sum(0.8**k for k in range(K)), rel=1e-6)


def test_the_targets_own_logits_survive_everywhere() -> None:
    data = blocks()
    data["draft_logits"] = data["target_logits"].clone()
    _, monitors = vat_loss(**data, settings=ObjectiveSettings())
    assert monitors.scalars()["accept_len"] == K + 1
    assert monitors.scalars()["late_matches"] == 0


def test_acceptance_is_among_the_blocks_that_have_the_position() -> None:
    data = blocks()
    data["draft_logits"] = data["target_logits"].clone()
    data["draft_logits"][0, 1] = data["target_logits"][0, 1].roll(1, -1)
    data["valid"][1:3, 1:] = False
    scalars = vat_loss(**data, settings=ObjectiveSettings())[1].scalars()
    assert [scalars[f"accepted/{k}"] for k in (1, 2, 3)] == pytest.approx([1.0, 1 - 1 / 4, 1.0])


def test_all_weightings_agree_on_a_one_position_block_and_differ_after_acceptance() -> None:
    data = blocks()
    data["draft_logits"] = data["target_logits"] * 0.5
    sums = {"geometric": sum(0.8**k for k in range(K)), "uniform": K}
    losses = {
        (weighting, schedule): vat_loss(
            **data, settings=ObjectiveSettings(weighting=weighting, schedule=schedule, head=False)
        )[0].item()
        * sums[schedule]
        for weighting, schedule in (("adaptive", "geometric"), ("fixed", "geometric"), ("fixed", "uniform"))
    }
    assert losses["adaptive", "geometric"] == pytest.approx(losses["fixed", "uniform"], rel=1e-6)
    assert losses["fixed", "geometric"] < losses["adaptive", "geometric"]


def test_the_head_alone_reaches_the_drafter_and_weights_carry_no_gradient() -> None:
    data = blocks()
    data["draft_logits"].requires_grad_()
    data["survival_logits"].requires_grad_()
    loss, _ = vat_loss(**data, settings=ObjectiveSettings())
    loss.backward()
    assert data["survival_logits"].grad is not None and data["survival_logits"].grad.abs().sum() > 0
    star = adaptive_weights(torch.tensor([2]), torch.tensor([1.0, 0.8], requires_grad=False))
    assert not star.requires_grad
    without, _ = vat_loss(**data, settings=ObjectiveSettings(head=False))
    (gradient,) = torch.autograd.grad(without, data["survival_logits"], allow_unused=True)
    assert gradient is None or not gradient.any()


def test_a_shorter_block_is_scored_on_its_valid_prefix_only() -> None:
    data = blocks()
    data["draft_logits"] = data["target_logits"].clone()
    data["valid"][:, 3:] = False
    loss, monitors = vat_loss(**data, settings=ObjectiveSettings())
    assert monitors.scalars()["accept_len"] == 4
    short = {name: tensor[:, :3] for name, tensor in data.items()}
    scale = sum(0.8**k for k in range(K)) / sum(0.8**k for k in range(3))
    assert loss.item() * scale == pytest.approx(vat_loss(**short, settings=ObjectiveSettings())[0].item(), rel=1e-6)
    data["draft_logits"][:, 3:] = -7.0
    assert vat_loss(**data, settings=ObjectiveSettings())[0].item() == loss.item()


def test_a_hole_in_the_mask_ends_the_block() -> None:
    data, holed = blocks(), blocks()
    data["valid"][:, 2:] = False
    holed["valid"][:, 2] = False
    settings = ObjectiveSettings()
    assert vat_loss(**data, settings=settings)[0] == vat_loss(**holed, settings=settings)[0]


def test_blocks_without_a_valid_position_do_not_count() -> None:
    data = blocks()
    data["valid"][2:] = False
    two = {name: tensor[:2] for name, tensor in data.items()}
    settings = ObjectiveSettings()
    assert vat_loss(**data, settings=settings)[0].item() == pytest.approx(vat_loss(**two, settings=settings)[0].item())
    data["valid"][:] = False
    loss, monitors = vat_loss(**data, settings=settings)
    assert loss.item() == 0 and monitors.scalars()["accept_len"] == 1


def test_a_target_choice_outside_the_draft_vocabulary_is_rejected_and_keeps_its_head_loss() -> None:
    target_ids = torch.tensor([1, 2, 5, 7, 11])
    data = blocks(2, columns=5)
    data["target_logits"][..., target_ids] += 10
    data["labels"] = data["target_logits"].argmax(-1)
    data["draft_logits"] = data["target_logits"][..., target_ids].clone()
    settings = ObjectiveSettings()
    _, monitors = vat_loss(**data, settings=settings, target_ids=target_ids)
    assert monitors.scalars()["accept_len"] == K + 1

    data["target_logits"][:, 2, 3] = 99
    data["labels"] = data["target_logits"].argmax(-1)
    data["draft_logits"].requires_grad_()
    data["survival_logits"].requires_grad_()
    loss, monitors = vat_loss(**data, settings=settings, target_ids=target_ids)
    loss.backward()
    assert monitors.scalars()["accept_len"] == 3
    assert not data["draft_logits"].grad[:, 2].any()  # type: ignore[index]
    assert data["survival_logits"].grad[:, 2].all()  # type: ignore[index]


def test_head_auc_is_one_for_a_perfect_head_and_half_for_a_constant_one() -> None:
    data = blocks()
    data["draft_logits"] = data["target_logits"].clone()
    data["draft_logits"][: N // 2] = -data["draft_logits"][: N // 2]
    data["survival_logits"] = torch.where(torch.arange(N)[:, None] < N // 2, -1.0, 1.0).expand(N, K).double()
    settings = ObjectiveSettings()
    assert vat_loss(**data, settings=settings)[1].scalars()["head_auc/2"] == 1
    data["survival_logits"] = torch.zeros(N, K, dtype=torch.float64)
    assert vat_loss(**data, settings=settings)[1].scalars()["head_auc/2"] == 0.5


def test_monitors_add() -> None:
    data = blocks()
    settings = ObjectiveSettings()
    whole = vat_loss(**data, settings=settings)[1].scalars()
    parts = [vat_loss(**{n: t[s] for n, t in data.items()}, settings=settings)[1] for s in (slice(0, 2), slice(2, N))]
    added = (parts[0] + parts[1]).scalars()
    shared = [name for name in whole if not name.startswith("head_auc")]
    assert [added[n] for n in shared] == pytest.approx([whole[n] for n in shared])


def test_disagreement_of_corpus_and_target_is_counted() -> None:
    data = blocks()
    assert vat_loss(**data, settings=ObjectiveSettings())[1].scalars()["disagreement"] == 0
    data["labels"][0, :3] = (data["labels"][0, :3] + 1) % V
    data["valid"][0, 2:] = False
    found = vat_loss(**data, settings=ObjectiveSettings())[1].scalars()["disagreement"]
    assert found == pytest.approx(2 / (N * K - 3))
