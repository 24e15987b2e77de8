"""What a run says: lines for people, whose reader may leave while it takes steps."""

from __future__ import annotations

from collections.abc import Callable

Say = Callable[[str], None]


class RunOutput:
    """Says lines by `say`. While it `defers`, a failure is kept, and nothing more is said."""

    def __init__(self, say: Say) -> None:
        self._say = self.guard(say)
        self.defers = False
        self.failure: BaseException | None = None

    def __call__(self, line: str) -> None:
        self._say(line)

    def guard(self, say: Say) -> Say:
        """Another way to say lines, under the same rule."""

        def guarded(line: str) -> None:
            if self.failure is not None:
                return
            try:
                say(line)
            except (OSError, ValueError, SystemExit) as error:  # rich exits where its reader left
                if not self.defers:
                    raise
                self.failure = error

        return guarded
