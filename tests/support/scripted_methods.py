"""Methods with scripted answers and times, and the trials they make."""

from dataclasses import dataclass, field

from tierspec.decoding import DecodingStats, SamplingParams
from tierspec.evaluation.comparison import compare
from tierspec.evaluation.methods import Answer, Method

LOOP = [7, 8] * 40
PLAIN = list(range(80))


@dataclass
class Scripted:
    """A method whose answers and times are given; it notes every call."""

    name: str
    calls: list[tuple[str, list[int], SamplingParams]]
    answers: dict[int, list[int]]
    seconds: list[float]
    accepted: int | None = None
    used: int = field(default=0)

    def run(self, prompt_ids, sampling):
        self.calls.append((self.name, list(prompt_ids), sampling))
        if sampling.max_new_tokens < 80:
            return Answer([], 9.0)
        seconds = self.seconds[self.used % len(self.seconds)]
        self.used += 1
        stats = None
        if self.accepted is not None:
            stats = DecodingStats(verifier_calls=3)
            stats.record_round("suffix", 4, self.accepted, self.accepted + 1, False)
        return Answer(self.answers[prompt_ids[0]], seconds, stats)

    def method(self):
        return Method(self.name, self.run)


def trials_of(repeats=3, stop=lambda: False, **changes):
    calls: list = []
    base = Scripted("autoregressive", calls, {1: LOOP, 2: PLAIN}, [2.0, 4.0, 3.0], accepted=0)
    fast = Scripted("suffix", calls, changes.get("fast", {1: LOOP, 2: PLAIN}), [1.0, 1.0, 5.0], accepted=2)
    other = Scripted("transformers", calls, {1: LOOP, 2: PLAIN[:79]}, [8.0])
    methods = [m.method() for m in (base, fast, other)]
    prompts = [("p1", [1]), ("p2", [2])]
    return compare(methods, prompts, SamplingParams(80, seed=5), repeats=repeats, stop=stop), calls
