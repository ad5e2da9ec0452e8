"""Judges whether answers are correct: equal to the reference's, or as likely as rounding permits."""

from collections import Counter
from collections.abc import Callable

from tools.lab.forked_engine import WrongError

REGRET_MAX = 0.06
"""Natural logarithms, averaged over an answer's tokens: rounding causes up to 0.02."""

REGRET_MEAN_MAX = 0.008
"""Averaged over all answers: rounding causes 0.002, one wrong block at a prompt's beginning several times that."""

Score = Callable[[list[int], list[list[int]]], list[float]]
"""By how much the answers (second) to prompts of these numbers (first) are less likely than the best ones."""


class Judge:
    """Compares answers with those of an engine without a connector."""

    def __init__(self, reference: list[list[int]], spoilt: list[list[int]] | None) -> None:
        """``spoilt``: answers to the same prompts with one wrong block; None if answers must be equal."""
        self._reference = reference
        self._spoilt = spoilt
        self._seen: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self._first_round: dict[tuple[int, tuple[int, ...]], int] = {}
        self.regret_max = self.regret_mean = 0.0

    def take(self, round_number: int, prompt: int, tokens: list[int]) -> None:
        """Judges an answer, or keeps it for ``prove``.

        Raises:
            WrongError: the answer differs from the reference where it must not.
        """
        if self._spoilt is not None:
            answer = (prompt, tuple(tokens))
            self._seen[answer] += 1
            self._first_round.setdefault(answer, round_number)
        elif tokens != self._reference[prompt]:
            raise WrongError(f"prompt {prompt}: {tokens} is not the reference's {self._reference[prompt]}")

    def prove(self, score: Score) -> None:
        """Judges the answers that were kept.

        Raises:
            WrongError: answers are less likely than rounding explains.
        """
        if self._spoilt is None or not self._seen:
            return
        kept = list(self._seen)
        prompts = [prompt for prompt, _ in kept] + list(range(len(self._spoilt)))
        found = score(prompts, [list(tokens) for _, tokens in kept] + self._spoilt)
        regrets, of_spoilt = dict(zip(kept, found, strict=False)), found[len(kept) :]
        if sum(of_spoilt) / len(of_spoilt) < 2 * REGRET_MEAN_MAX:
            raise WrongError(f"the comparison shows nothing: one wrong block makes {of_spoilt}")
        worst = max(regrets, key=regrets.__getitem__)
        self.regret_max = regrets[worst]
        self.regret_mean = sum(regrets[one] * times for one, times in self._seen.items()) / self._seen.total()
        if self.regret_max > REGRET_MAX:
            prompt, tokens = worst
            where = f"engine {self._first_round[worst]}, prompt {prompt}"
            raise WrongError(f"{where}: {list(tokens)} is less likely than the best answer by {self.regret_max:.4f}")
        if self.regret_mean > REGRET_MEAN_MAX:
            raise WrongError(f"answers are less likely than the best ones by {self.regret_mean:.4f} on the average")
