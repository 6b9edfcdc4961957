"""The `remit` command, and what its exit status says."""

from remit.cli.exits import of_error, of_outcome

__all__ = ["of_error", "of_outcome"]
