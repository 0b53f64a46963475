"""``python -m dynguard``: the command line."""

from dynguard.cli import main

if __name__ == "__main__":
    main()
