"""`python -m jobs.payoff`: learn from a run's rollouts which suffix drafts pay."""

from typing import Any

from jobs.command import JobContext, run_job
from pipelines.cluster import ray_session
from pipelines.payoff import train_payoff
from pipelines.rollouts.schema import read_rollouts
from tierspec.artifacts import run_directory
from tierspec.config import Settings
from tierspec.evaluation.report import aligned, number


def main(settings: Settings, context: JobContext) -> dict[str, Any]:
    read_rollouts(run_directory(settings, "rollouts") / "train")
    output = context.open_stage(settings, "payoff")
    with ray_session(settings):
        metrics = train_payoff(settings, output, context.stop_requested, context.log)
    print(render(metrics))
    learned = metrics["learned_history"]
    return metrics | {"output": str(output), "precision": learned["precision"], "recall": learned["recall"]}


def render(metrics: dict[str, Any]) -> str:
    """Precision and recall, and how predictions compare with payoffs."""
    columns = ("drafts of other requests", "rows", "pay", "chosen", "precision", "recall")
    names = {
        "oracle_history": "history by an oracle",
        "learned_history": "history by the predictor",
        "learned_history_at_rounds": "only where a round begins",
    }
    rows: list[tuple[str, ...]] = [columns]
    for key, name in names.items():
        found = metrics[key]
        shares = [number(found[column]) for column in ("pays", "chosen", "precision", "recall")]
        rows.append((name, str(found["rows"]), *shares))
    deciles: list[tuple[str, ...]] = [("decile of the prediction", "predicted", "payoff")]
    for index, (predicted, payoff) in enumerate(metrics["learned_history"]["calibration"], start=1):
        deciles.append((str(index), number(predicted), number(payoff)))
    return f"{aligned(rows)}\n\n{aligned(deciles)}"


if __name__ == "__main__":
    run_job("payoff", main)
