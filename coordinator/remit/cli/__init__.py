"""The `remit` command."""
