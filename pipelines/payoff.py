"""The payoff stage: replays rollouts on Ray Data, trains the predictor, and says how good it is."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import ray
from numpy.typing import NDArray
from ray.data import DataContext

from pipelines.rollouts.schema import read_rollouts
from tierspec.artifacts import atomic_write_json, read_object, run_directory
from tierspec.config import Settings
from tierspec.drafters.payoff import FEATURES, PayoffPredictor, TokenClasses, token_classes
from tierspec.errors import SettingError
from tierspec.models import ModelConfig
from tierspec.models.loading import load_tokenizer, resolve_source
from tierspec.models.weights import read_config
from tierspec.training.payoff import fit_payoff, payoff_metrics
from tierspec.training.replay import Policy, ReplayRows, neural_lengths, oracle, replay

RESULT = "result.json"
_USUAL_ACCEPTANCE = (0.6, 0.6, 0.6)
"""Of a neural drafter's positions, where none has been trained yet."""
_BLOCKS = 16


@dataclass(frozen=True)
class _Replayer:
    """Replays a table of rollouts; what it needs travels to the workers once."""

    settings: Settings
    classes: TokenClasses
    neural: NDArray[np.float64]
    predictor: PayoffPredictor | None

    def __call__(self, table: pa.Table) -> pa.Table:
        parts: list[pa.Table] = []
        for row in table.to_pylist():
            rows = self._replay(row)
            columns: dict[str, Any] = {name: rows.features[:, i] for i, name in enumerate(FEATURES)}
            columns |= {"payoff": rows.payoff, "visited": rows.visited}
            columns["request"] = pa.array([row["sample_id"].partition("#")[0]] * len(rows), pa.string())
            columns["source"] = pa.array([row["source"] or ""] * len(rows), pa.string())
            parts.append(pa.table(columns))
        return pa.concat_tables(parts)

    def _replay(self, row: dict[str, Any]) -> ReplayRows:
        return replay(
            row["prompt_ids"],
            row["response_ids"],
            suffix=self.settings.draft.suffix,
            classes=self.classes,
            max_new_tokens=self.settings.rollout.max_new_tokens,
            neural=self.neural,
            policy=self._policy(),
            seed=int.from_bytes(hashlib.sha256(row["sample_id"].encode()).digest()[:4], "big"),
        )

    def _policy(self) -> Policy:
        predictor, threshold = self.predictor, self.settings.payoff.threshold
        if predictor is None:
            return oracle(threshold)
        return lambda row, payoff: bool(predictor.predict([row])[0] >= threshold)


@dataclass(frozen=True)
class _Labelled:
    """Rows, the request of each and the source of its prompt."""

    rows: ReplayRows
    request: NDArray[np.str_]
    source: NDArray[np.str_]


def train_payoff(
    settings: Settings,
    output: Path,
    stop: Callable[[], bool] = lambda: False,
    log: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Learns the payoff of suffix drafts from the run's training rollouts; Ray must be up.

    Two rounds: one over histories that an oracle made, one with the first predictor in its place, fitted on the rows of
    both. Requests, whose turns stay together, are split into those that train and those that test. Writes the predictor
    of the second round and result.json, or nothing if `stop` came before the end.

    Raises:
        SettingError: no rollouts, or too few to train and test on.
    """
    (output / RESULT).unlink(missing_ok=True)
    table = read_rollouts(run_directory(settings, "rollouts") / "train")
    source = resolve_source(settings.target.source)
    tokenizer = load_tokenizer(source)
    size = ModelConfig.from_hf(read_config(source)).vocab_size
    classes = token_classes(tokenizer.batch_decode([[i] for i in range(len(tokenizer))]))
    classes = np.concatenate((classes[:size], np.zeros(max(0, size - len(classes)), np.uint8)))
    neural = neural_lengths(_acceptance(run_directory(settings, "drafter")))

    def made(predictor: PayoffPredictor | None) -> _Labelled:
        return _replayed(table, _Replayer(settings, classes, neural, predictor))

    def fitted(rows: ReplayRows) -> PayoffPredictor:
        parameters = fit_payoff(rows, settings.payoff, seed=settings.run.seed)
        suffix = settings.draft.suffix.model_dump(mode="json")
        return PayoffPredictor(parameters, classes, settings.target.source, suffix)

    threshold = settings.payoff.threshold
    first = made(None)
    testing = _is_test(first.request, settings)
    if not testing.any() or testing.all():
        raise SettingError("payoff.test_share: the rollouts hold too few requests with suffix drafts to train and test")
    log(f"{len(first.rows)} drafts replayed, {int(testing.sum())} of them to test on")
    initial = fitted(first.rows.where(~testing))
    if stop():
        raise KeyboardInterrupt
    second = made(initial)
    testing_again = _is_test(second.request, settings)
    both = ReplayRows.joined([first.rows.where(~testing), second.rows.where(~testing_again)])
    log("replayed again by the predictor's own choices")
    final = fitted(both)
    tested = second.rows.where(testing_again)
    metrics: dict[str, Any] = {
        "threshold": threshold,
        "oracle_history": _measured(initial, first.rows.where(testing), threshold),
        "learned_history": _measured(final, tested, threshold),
        "learned_history_at_rounds": _measured(final, tested.where(tested.visited), threshold),
        "payoff_histogram": np.bincount(tested.payoff).tolist(),
        "by_source": _by_source(final, second, testing_again, threshold),
    }
    if settings.payoff.leave_one_out:
        metrics["left_out"] = _left_out(second, threshold, fitted, stop)
    if stop():
        raise KeyboardInterrupt
    PayoffPredictor(final.parameters, classes, final.target, final.suffix, metrics).save(output)
    atomic_write_json(output / RESULT, metrics)
    return metrics


def _replayed(table: pa.Table, replayer: _Replayer) -> _Labelled:
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)
    step = max(1, -(-table.num_rows // _BLOCKS))
    blocks = [table.slice(start, step) for start in range(0, table.num_rows, step)]
    rows = ray.data.from_arrow(blocks).map_batches(replayer, batch_size=None, batch_format="pyarrow")
    found = [cast(pa.Table, batch) for batch in rows.iter_batches(batch_size=None, batch_format="pyarrow")]
    joined = pa.concat_tables([part for part in found if part.num_columns] or [replayer(table.slice(0, 0))])
    features = np.stack([joined.column(name).to_numpy() for name in FEATURES], 1).astype(np.float32)
    values = ReplayRows(features, joined.column("payoff").to_numpy(), joined.column("visited").to_numpy())
    request = np.array(joined.column("request").to_pylist(), dtype=np.str_)
    source = np.array(joined.column("source").to_pylist(), dtype=np.str_)
    order = np.argsort(request, kind="stable")  # blocks come as they are ready
    return _Labelled(
        ReplayRows(values.features[order], values.payoff[order], values.visited[order]), request[order], source[order]
    )


def _is_test(requests: NDArray[np.str_], settings: Settings) -> NDArray[np.bool_]:
    """By a hash of the request, so that a request tests whatever else is in the rollouts."""
    names, index = np.unique(requests, return_inverse=True)
    salt = f"{settings.run.seed}/"
    shares = [int.from_bytes(hashlib.sha256((salt + name).encode()).digest()[:4], "big") / 2**32 for name in names]
    drawn: NDArray[np.bool_] = np.array([share < settings.payoff.test_share for share in shares], dtype=np.bool_)
    return drawn[index]


def _measured(predictor: PayoffPredictor, rows: ReplayRows, threshold: float) -> dict[str, Any]:
    return payoff_metrics(predictor.predict(rows.features), rows.payoff, threshold)


def _by_source(
    predictor: PayoffPredictor, labelled: _Labelled, testing: NDArray[np.bool_], threshold: float
) -> dict[str, Any]:
    found = {}
    for name in sorted(set(labelled.source.tolist())):
        metrics = _measured(predictor, labelled.rows.where(testing & (labelled.source == name)), threshold)
        found[name] = {key: metrics[key] for key in ("rows", "pays", "chosen", "precision", "recall")}
    return found


def _left_out(
    labelled: _Labelled, threshold: float, fitted: Callable[[ReplayRows], PayoffPredictor], stop: Callable[[], bool]
) -> dict[str, Any]:
    found = {}
    names = sorted(set(labelled.source.tolist()))
    for name in names if len(names) > 1 else []:
        if stop():
            break
        mine = labelled.source == name
        found[name] = _measured(fitted(labelled.rows.where(~mine)), labelled.rows.where(mine), threshold)
    return found


def _acceptance(drafter: Path) -> Sequence[float]:
    """P(position accepted | reached) of the run's neural drafter, as measured on held-out rollouts."""
    if (drafter / "metrics.json").is_file():
        heldout = read_object(drafter / "metrics.json").get("heldout") or {}
        if measured := heldout.get("per_position_acceptance"):
            return cast(Sequence[float], measured)
    return _USUAL_ACCEPTANCE
