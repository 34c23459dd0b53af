from dataclasses import replace

import pytest
import torch

from tierspec.config import ObjectiveSettings
from tierspec.training.acceptance import ScoredRows, greedy_acceptance
from tierspec.training.chunked_objective import TeacherRows, chunked_vat_loss
from tierspec.training.objective import columns_of, normaliser, vat_loss

N, K, V, D, E = 7, 4, 23, 8, 6
TARGET_IDS = torch.tensor([0, 1, 4, 5, 8, 9, 10, 13, 15, 17, 20, 22])


class Case:
    """Random blocks in which several look at the same teacher rows, and a third of the positions is accepted."""

    def __init__(self, dtype: torch.dtype, target_ids: torch.Tensor = TARGET_IDS) -> None:
        g = torch.Generator().manual_seed(3)
        head = torch.randn(V, E, generator=g, dtype=dtype)
        teacher_hidden = torch.randn(9, E, generator=g, dtype=dtype)
        rows = (torch.arange(N)[:, None] + torch.arange(K)) % 9
        self.ids = target_ids
        self.hidden = torch.randn(N, K, D, generator=g, dtype=dtype, requires_grad=True)
        self.weight = torch.randn(target_ids.numel(), D, generator=g, dtype=dtype, requires_grad=True)
        self.survival = torch.randn(N, K, generator=g, dtype=dtype, requires_grad=True)
        self.valid = torch.arange(K) < torch.tensor([K, K, 2, K, 0, 1, K])[:, None]
        self.target_logits = (teacher_hidden @ head.T)[rows]
        self.labels = self.target_logits.argmax(-1).clone()
        self.labels[0, 1] = 2
        top = columns_of(self.target_logits.argmax(-1), target_ids, V)
        with torch.no_grad():
            agree = torch.rand(N, K, generator=g) < 0.6
            self.hidden[agree & (top >= 0)] = 4 * self.weight[top[agree & (top >= 0)]]
        self.full_head = head
        self.teacher = TeacherRows(teacher_hidden, rows, top, columns_of(self.labels, target_ids, V), head[target_ids])

    def whole(self, settings: ObjectiveSettings) -> tuple[torch.Tensor, dict[str, float]]:
        loss, monitors = vat_loss(
            self.hidden @ self.weight.T,
            self.target_logits,
            self.labels,
            self.survival,
            self.valid,
            settings,
            target_ids=self.ids,
        )
        return loss, monitors.scalars()

    def chunked(self, settings: ObjectiveSettings, chunk: int) -> tuple[torch.Tensor, dict[str, float]]:
        loss, monitors = chunked_vat_loss(
            self.hidden, self.weight, self.survival, self.teacher, self.valid, settings, blocks_per_chunk=chunk
        )
        return loss, monitors.scalars()

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [self.hidden, self.weight, self.survival]


@pytest.mark.parametrize("chunk", [1, 3, N])
@pytest.mark.parametrize(
    "settings",
    [
        ObjectiveSettings(),
        ObjectiveSettings(hard=False, weighting="fixed", head=False),
        ObjectiveSettings(soft=False, weighting="fixed", schedule="uniform", head_beta=0.3),
        ObjectiveSettings(schedule="exponential", gamma=2.0),
        ObjectiveSettings(weighting="cutoff"),
        ObjectiveSettings(soft=False, weighting="d-pace", head=False),
    ],
    ids=["vat", "eagle", "hard", "exponential", "cutoff", "d-pace"],
)
def test_chunks_equal_the_whole(settings: ObjectiveSettings, chunk: int) -> None:
    case = Case(torch.float32)
    expected, monitors = case.whole(settings)
    loss, chunk_monitors = case.chunked(settings, chunk)
    assert 1.2 < monitors["accept_len"] < K
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert chunk_monitors == pytest.approx(monitors, rel=1e-5, abs=1e-6)
    for ours, theirs in zip(
        torch.autograd.grad(loss, case.leaves), torch.autograd.grad(expected, case.leaves), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [2, N])
def test_any_acceptance_rule_sees_every_row_once_and_decides(chunk: int) -> None:
    case = Case(torch.float64)
    drawn = torch.rand(N, K, generator=torch.Generator().manual_seed(4)) < 0.7
    parts = iter(drawn.flatten().split(chunk * K))
    whole = vat_loss(
        case.hidden @ case.weight.T,
        case.target_logits,
        case.labels,
        case.survival,
        case.valid,
        ObjectiveSettings(),
        target_ids=case.ids,
        accepted=drawn,
    )
    leaves = (case.hidden, case.weight, case.survival)
    loss, monitors = chunked_vat_loss(
        *leaves,
        case.teacher,
        case.valid,
        ObjectiveSettings(),
        rule=lambda rows: next(parts),
        blocks_per_chunk=chunk,
    )
    assert loss.item() == pytest.approx(whole[0].item(), rel=1e-9)
    assert monitors.scalars() == pytest.approx(whole[1].scalars())


def test_rules_see_the_distributions_of_both_models() -> None:
    case = Case(torch.float64)
    teacher = replace(case.teacher, log_normaliser=(case.teacher.hidden @ case.full_head.T).logsumexp(-1))
    seen: list[ScoredRows] = []

    def watch(rows: ScoredRows) -> torch.Tensor:
        seen.append(replace(rows, draft=rows.draft.clone(), target=rows.target.clone()))
        return greedy_acceptance(rows)

    chunked_vat_loss(*case.leaves, teacher, case.valid, ObjectiveSettings(), rule=watch, blocks_per_chunk=N)
    p = case.target_logits.softmax(-1)[..., case.ids].flatten(0, 1)
    torch.testing.assert_close(seen[0].target * seen[0].covered[:, None], p)
    torch.testing.assert_close(seen[0].covered, p.sum(-1))
    torch.testing.assert_close(seen[0].draft, (case.hidden @ case.weight.T).softmax(-1).flatten(0, 1))


def test_gradcheck() -> None:
    case = Case(torch.float64)
    settings = ObjectiveSettings()

    def loss(*leaves: torch.Tensor) -> torch.Tensor:
        return chunked_vat_loss(*leaves, case.teacher, case.valid, settings, blocks_per_chunk=2)[0]

    assert torch.autograd.gradcheck(loss, tuple(case.leaves), fast_mode=True)


def test_full_vocabulary_needs_no_pruning() -> None:
    case = Case(torch.float64, torch.arange(V))
    expected, _ = case.whole(ObjectiveSettings())
    assert case.chunked(ObjectiveSettings(), 2)[0].item() == pytest.approx(expected.item(), rel=1e-9)


def test_parts_of_a_step_add_up_with_a_common_divisor() -> None:
    case = Case(torch.float64)
    settings = ObjectiveSettings()
    expected, _ = case.chunked(settings, N)
    total = 0.0
    divisor = 6 * sum(0.8**k for k in range(K))
    for part in (slice(0, 3), slice(3, N)):
        teacher = TeacherRows(
            case.teacher.hidden,
            case.teacher.rows[part],
            case.teacher.top_columns[part],
            case.teacher.label_columns[part],
            case.teacher.head,
        )
        leaves = (case.hidden[part], case.weight, case.survival[part])
        total += chunked_vat_loss(*leaves, teacher, case.valid[part], settings, divisor=divisor)[0].item()
    assert total == pytest.approx(expected.item(), rel=1e-6)


def test_states_are_drawn_to_the_targets() -> None:
    case = Case(torch.float64)
    states = torch.randn(N, K, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    weight = case.teacher.head.clone().requires_grad_()
    settings = ObjectiveSettings(state=3.0)

    def run(settings: ObjectiveSettings) -> tuple[torch.Tensor, dict[str, float]]:
        loss, monitors = chunked_vat_loss(states, weight, case.survival, case.teacher, case.valid, settings)
        return loss, monitors.scalars()

    (loss, scalars), (without, bare) = run(settings), run(ObjectiveSettings())
    extra = torch.zeros((), dtype=torch.float64)
    for n in range(N):
        for k in range(K):
            if case.valid[n, : k + 1].all():
                target = case.teacher.hidden[case.teacher.rows[n, k]]
                extra = extra + 3.0 * 0.8**k * ((states[n, k] - target) ** 2).sum() / (target**2).sum()
    total = without + extra / normaliser(case.valid, settings)
    assert loss.item() == pytest.approx(total.item(), rel=1e-6)
    wanted, found = torch.autograd.grad(total, states)[0], torch.autograd.grad(loss, states)[0]
    assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-9)
    assert {name for name in scalars if name not in bare} == {f"state/{k}" for k in range(1, K + 1)}
    assert (
        chunked_vat_loss(
            case.teacher.hidden[case.teacher.rows], weight, case.survival, case.teacher, case.valid, settings
        )[1].scalars()["state/1"]
        == 0.0
    )
