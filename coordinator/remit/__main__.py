"""`python -m remit`: the same as the `remit` command."""

from remit.cli.entry import main

if __name__ == "__main__":
    main()
