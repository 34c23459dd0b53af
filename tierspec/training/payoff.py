"""Training of the payoff predictor, and how good it is (HVD, arXiv 2606.01019 section 3.3).

Squared error is the loss because committed tokens are linear in the payoff, so its mean is what a router needs, even
where payoffs are all or nothing. Adam with a constant rate; z-scores by the training rows; batches small enough for 32
steps per epoch, which the published 65,536 rows are not on small corpora (our choices).
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tierspec.config import PayoffSettings
from tierspec.drafters.payoff.predictor import HIDDEN, Array
from tierspec.training.replay import ReplayRows

_LEAST_STEPS = 32  # per epoch
_LEAST_BATCH = 64


def fit_payoff(rows: ReplayRows, settings: PayoffSettings, *, seed: int) -> dict[str, Array]:
    """The predictor's parameters (see `parameter_shapes`). `rows` must not be empty."""
    features, payoff = torch.from_numpy(rows.features), torch.from_numpy(rows.payoff).float()
    mean, std = features.mean(0), features.std(0, correction=0)
    std = torch.where(std > 1e-6, std, torch.ones_like(std))
    x = (features - mean) / std
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        width = features.shape[1]
        layers = [nn.Linear(width, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 1)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    with torch.no_grad():
        layers[2].bias.fill_(payoff.mean())
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    batch = min(settings.batch_size, max(_LEAST_BATCH, len(rows) // _LEAST_STEPS))
    for _ in range(settings.epochs):
        for index in torch.randperm(len(rows), generator=generator).split(batch):
            loss = (model(x[index])[:, 0] - payoff[index]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    learned = {"mean": mean, "std": std}
    for name, layer in zip(("hidden1", "hidden2", "output"), layers, strict=True):
        learned |= {f"{name}.weight": layer.weight.detach(), f"{name}.bias": layer.bias.detach()}
    return {name: value.numpy().copy() for name, value in learned.items()}


def payoff_metrics(predicted: Array, payoff: NDArray[np.int64], threshold: float) -> dict[str, Any]:
    """Precision and recall of `predicted` >= `threshold` for payoffs of at least that, the shares of both, the mean
    absolute error, and by decile of the prediction its mean and that of the payoff."""
    chosen, pays = predicted >= threshold, payoff >= threshold
    both = int((chosen & pays).sum())
    order = np.argsort(predicted, kind="stable")
    deciles = [part for part in np.array_split(order, 10) if len(part)]
    return {
        "rows": len(payoff),
        "pays": float(pays.mean()) if len(payoff) else None,
        "chosen": float(chosen.mean()) if len(payoff) else None,
        "precision": both / int(chosen.sum()) if chosen.any() else None,
        "recall": both / int(pays.sum()) if pays.any() else None,
        "mean_absolute_error": float(np.abs(predicted - payoff).mean()) if len(payoff) else None,
        "calibration": [[float(predicted[part].mean()), float(payoff[part].mean())] for part in deciles],
    }
