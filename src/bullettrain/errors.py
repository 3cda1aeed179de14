"""What a user's mistake is told by."""


class UserError(ValueError):
    """A mistake in what was asked for: one line that says what to change. The command ends with status 2."""
