"""What a subcommand raises when its input cannot be used."""


class UsageError(Exception):
    """Bad input; the message is one sentence for the person at the terminal."""
