"""One sample, token by token: the drafts of every anchor, where verification stopped, and what the head believed."""

from collections.abc import Mapping
from typing import Any

import torch

from tierspec.training.data import Sample
from tierspec.training.features import SequenceFeatures
from tierspec.training.simulation import survival
from tierspec.training.trainee import Trainee

_ANCHORS_AT_ONCE = 64


@torch.no_grad()
def token_view(trainee: Trainee, features: SequenceFeatures, sample: Sample) -> dict[str, Any]:
    """A description of `sample` as plain values, by greedy simulated verification.

    Returns:
        sample_id; token_ids; supervised_from, the first supervised token; blocks, one per anchor, each with `anchor`
        (index of the last token it knows), `drafted` (target ids), `survived` (how many were accepted before the first
        miss) and `belief` (the verification head's probability that each survives; empty if the head is not trained).
        Blocks at the end are shorter.
    """
    rows = torch.arange(sample.first_anchor, sample.first_anchor + sample.num_anchors)
    batch = trainee.collate([sample], [features], [rows])
    states_AKD = trainee.states(batch)[0].float()
    head_DC = trainee.token_head().float().T
    draft_AK = torch.cat([(part @ head_DC).argmax(-1) for part in states_AKD.split(_ANCHORS_AT_ONCE)])
    valid_AK = batch.valid_BAK[0]
    survived_AK = survival(draft_AK == batch.teacher.top_columns.view_as(draft_AK), valid_AK)
    belief_AK = torch.sigmoid(trainee.verification_head(states_AKD)[..., 0])
    drafted_AK = trainee.vocabulary.target_ids[draft_AK.cpu()]
    blocks = []
    for row, drafted, survived, belief, valid in zip(
        rows.tolist(), drafted_AK, survived_AK, belief_AK, valid_AK.sum(-1).tolist(), strict=True
    ):
        blocks.append(
            {
                "anchor": row + 1,
                "drafted": drafted[:valid].tolist(),
                "survived": int(survived.sum()),
                "belief": [round(value, 4) for value in belief[: valid * trainee.trains_head].tolist()],
            }
        )
    return {
        "sample_id": sample.sample_id,
        "token_ids": list(sample.token_ids),
        "supervised_from": len(sample.prompt_ids) + 1,
        "blocks": blocks,
    }


def walked_blocks(view: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The blocks that decoding would visit: each begins behind what the one before it committed."""
    by_anchor = {block["anchor"]: block for block in view["blocks"]}
    visited = []
    anchor = view["supervised_from"] - 1
    while anchor in by_anchor:
        visited.append(by_anchor[anchor])
        anchor += by_anchor[anchor]["survived"] + 1
    return visited
