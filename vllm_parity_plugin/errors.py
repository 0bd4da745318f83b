"""The one error type of both packages: found, why it matters, fix."""


class ParityError(RuntimeError):
    """A refusal, always in three parts and one paragraph.

    ``str(ParityError("A is 1.", "B needs 2.", "set --a 2."))`` is
    ``"A is 1. B needs 2. Fix: set --a 2."``

    Args:
        found: what was seen, with the values.
        why: what would go wrong.
        fix: the exact change that helps.
    """

    def __init__(self, found: str, why: str, fix: str) -> None:
        self.found, self.why, self.fix = found, why, fix
        super().__init__(f"{found} {why} Fix: {fix}")


class NotRepeatable(ParityError):
    """A repeated request whose first answer is gone, so that it would be sampled again."""
