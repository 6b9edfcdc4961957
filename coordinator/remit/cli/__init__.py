"""The `remit` command."""

__all__: list[str] = []
