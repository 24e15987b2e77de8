"""What happens where the model gives a logprob that is not finite.

**Seen**: the sample ends with "error" and without that token (`RolloutSequence.append`).

**Whose fault**: the sample may owe it to cache blocks that another computed, or to a wrong guess
behind its last token. A row that is not finite reaches rows before it in its block of keys: a
masked probability is 0, and 0 times NaN is NaN. Such a block is no longer what another sequence
would compute, so the blocks of a sequence that fails are not found again
(`BlockManager.distrust`).

**Again**: then it starts over alone, without blocks of others and without guesses
(`Scheduler.take_in`). If it fails again it is by its own tokens. Another sample with the same
tokens then fails without starting over.

**Told**: `stream` yields its completion like the others; `generate` finishes the others and raises
a `FailedRequestsError`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.rollout.completion import Completion
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.rollout.sequence import RolloutSequence


class Failures:
    """Which tokens have failed by themselves."""

    def __init__(self) -> None:
        self._hopeless: set[tuple[SamplingParams, tuple[int, ...]]] = set()

    def may_pass_alone(self, sequence: RolloutSequence, *, alone: bool) -> bool:
        """Whether a sequence that failed may be computed without others' help; `alone`: it was."""
        failed = sequence.params, tuple(sequence.token_ids)
        if alone:
            self._hopeless.add(failed)
        return failed not in self._hopeless


class FailedRequestsError(ConsistencyError):
    """The model gave numbers that are not finite for some requests; the others were finished.

    Of all completions, `failed` holds those with an error and `completions` the others.
    """

    def __init__(self, completions: Sequence[Completion]) -> None:
        self.completions = [c for c in completions if c.error is None]
        self.failed = [c for c in completions if c.error is not None]
        lines = [f"request {c.request_id!r}, {c.error}" for c in self.failed]
        super().__init__("\n".join(lines))
