"""`python -m benchmarks.training`: a training step against its matrix products alone, its memory, and its batching.

`roofline`   a step (forward, backward, update; target features at hand) against the matrix products it is made of
`memory`     growth of a process over one step at a full vocabulary, with the logits of all rows and without
`bucketing`  rows computed per row that is needed, with sequences of similar length in one step and without
"""

import argparse
import gc
import json
import math
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.timing import median_seconds, write_result
from tierspec.config import ObjectiveSettings, Settings, load_settings
from tierspec.evaluation.environment import describe_environment
from tierspec.models import load_target
from tierspec.training.chunked_objective import TeacherRows, chunked_vat_loss
from tierspec.training.data import DataOrder, Sample, sample_anchors
from tierspec.training.families import build_trainee
from tierspec.training.features import FeatureRequest, TargetFeatures
from tierspec.training.objective import vat_loss
from tierspec.training.optimizer import GroupClippedAdamW

PARTS = ("roofline", "memory", "bucketing")
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm"}
_WIDTH = 576


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--config", default=str(Path(__file__).parents[1] / "configs" / "smollm2-135m.yaml"))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--vocabulary", type=int, default=49152, help="columns of the memory part")
    parser.add_argument("--tokens", type=int, default=2048, help="draft positions of the memory part")
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0 leaves the choice to torch")
    parser.add_argument("--output", help="file for the result as JSON")
    parser.add_argument("--one-step", choices=("whole", "chunked"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.one_step:
        print(step_growth(options.one_step, options.vocabulary, options.tokens))
        return
    settings = load_settings(options.config)
    result: dict[str, Any] = describe_environment() | {"repeats": options.repeats}
    if "roofline" in options.parts:
        result["roofline"] = roofline(settings, options.repeats)
    if "memory" in options.parts:
        result["memory"] = memory(options.vocabulary, options.tokens)
    if "bucketing" in options.parts:
        result["bucketing"] = bucketing(settings)
    write_result(options.output, result)
    print(json.dumps(result, indent=2))


def roofline(settings: Settings, repeats: int) -> dict[str, Any]:
    """Seconds of a step, and of its matrix products replayed one after the other on fresh tensors of those shapes."""
    training = settings.training
    target = load_target(settings.target.source, dtype=settings.target.dtype)
    samples = random_samples(training.batch_sequences, target.config.vocab_size)
    trainee, _ = build_trainee(settings, target, samples)
    optimizer = GroupClippedAdamW(trainee.parameter_groups(), training)
    features = TargetFeatures(target.decoder, trainee.feature_layers, max_length=training.max_length)(
        [FeatureRequest(i, s.token_ids, s.first_anchor) for i, s in enumerate(samples)]
    )
    anchors = [sample_anchors(sample, training.anchors, (0, i)) for i, sample in enumerate(samples)]

    def step() -> None:
        optimizer.zero_grad()
        loss, _ = trainee(trainee.collate(samples, features, anchors))
        loss.backward()
        optimizer.step()

    with MatrixProducts() as products:
        step()
    replays = products.replays()

    def replay() -> None:
        for work in replays:
            work()

    step_s, products_s = median_seconds(step, repeats=repeats), median_seconds(replay, repeats=repeats)
    tokens = sum(len(sample.token_ids) for sample in samples)
    return {
        "sequences": len(samples),
        "tokens": tokens,
        "products": len(replays),
        "step_seconds": step_s,
        "products_seconds": products_s,
        "share_of_roofline": products_s / step_s,
        "tokens_per_s": tokens / step_s,
        "gflops": products.flops / step_s / 1e9,
    }


class MatrixProducts(TorchDispatchMode):
    """Notes shapes, strides and types of every matrix product under it, backward passes included."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]]] = []
        self.flops = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        if name in _PRODUCTS:
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)][-2:]
            self.calls.append((name, [(tuple(t.shape), tuple(t.stride()), t.dtype) for t in tensors]))
            left, right = tensors
            self.flops += 2 * left.numel() * right.shape[-1]
        return function(*args, **(kwargs or {}))

    def replays(self) -> list[Any]:
        """Each product again, as a call without arguments."""
        made = []
        for name, layouts in self.calls:
            left, right = (torch.empty_strided(*layout[:2], dtype=layout[2]).normal_() for layout in layouts)
            product = torch.bmm if name == "aten::bmm" else torch.mm
            made.append(lambda product=product, left=left, right=right: product(left, right))
        return made


def memory(vocabulary: int, tokens: int) -> dict[str, Any]:
    """Peak growth in MiB of a fresh process over one step, by the way the objective is computed."""
    growth = {}
    for way in ("whole", "chunked"):
        sizes = ["--vocabulary", str(vocabulary), "--tokens", str(tokens)]
        command = [sys.executable, "-m", "benchmarks.training", "--one-step", way, *sizes]
        done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
        growth[way] = float(done.stdout.split()[-1])
    return {"vocabulary": vocabulary, "draft_positions": tokens, "mib": growth}


def step_growth(way: str, vocabulary: int, tokens: int) -> float:
    """MiB by which this process grew at most during one forward and backward pass of the objective."""
    depth = 4
    blocks = tokens // depth
    g = torch.Generator().manual_seed(0)
    head = torch.randn(vocabulary, _WIDTH, generator=g) / math.sqrt(_WIDTH)
    weight = head.clone().requires_grad_()
    teacher_hidden = torch.randn(tokens, _WIDTH, generator=g)
    hidden = torch.randn(blocks, depth, _WIDTH, generator=g, requires_grad=True)
    survival = torch.zeros(blocks, depth, requires_grad=True)
    valid = torch.ones(blocks, depth, dtype=torch.bool)
    rows = torch.arange(tokens).view(blocks, depth)
    labels = torch.randint(vocabulary, (blocks, depth), generator=g)
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    gc.collect()
    with PeakGrowth() as peak:
        if way == "whole":
            target_logits = (teacher_hidden @ head.T)[rows]
            loss, _ = vat_loss(hidden @ weight.T, target_logits, labels, survival, valid, ObjectiveSettings())
        else:
            teacher = TeacherRows(teacher_hidden, rows, labels, labels, head)
            loss, _ = chunked_vat_loss(hidden, weight, survival, teacher, valid, ObjectiveSettings())
        loss.backward()
    return peak.bytes / 2**20


class PeakGrowth:
    """Largest growth of this process' resident memory inside the block, sampled every few milliseconds."""

    def __enter__(self) -> "PeakGrowth":
        self._process = psutil.Process()
        self._start = self._process.memory_info().rss
        self._before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if peak > self._before:  # the system's own high-water mark, if it is of this block
            self.bytes = max(self.bytes, peak - self._start)

    def _watch(self) -> None:
        while not self._over.is_set():
            self.bytes = max(self.bytes, self._process.memory_info().rss - self._start)
            time.sleep(0.002)


def bucketing(settings: Settings) -> dict[str, Any]:
    """Rows of padded batches per real row over an epoch of sequences of mixed length."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4.9, 0.45, 1000).astype(int), 24, settings.training.max_length)
    size = settings.training.batch_sequences
    order = DataOrder(lengths.tolist(), size, 0)
    bucketed = np.array([lengths[order.samples(step)] for step in range(order.steps_per_epoch)])
    shuffled = lengths[rng.permutation(len(lengths))[: len(lengths) // size * size]].reshape(-1, size)
    ratios = {
        name: float((part.max(1) * size).sum() / part.sum())
        for name, part in (("bucketed", bucketed), ("shuffled", shuffled))
    }
    return {"batch_sequences": size, "rows_per_token": ratios, "gain": ratios["shuffled"] / ratios["bucketed"]}


def random_samples(count: int, vocabulary: int) -> list[Sample]:
    """Prompts of 40 tokens with answers of 100 to 160."""
    rng = np.random.default_rng(0)
    made = []
    for i in range(count):
        ids = rng.integers(3, vocabulary, 140 + int(rng.integers(60))).tolist()
        made.append(Sample(str(i), tuple(ids[:40]), tuple(ids[40:])))
    return made


if __name__ == "__main__":
    main()
