"""``python -m anyengine``: the command line."""

from anyengine.cli import main

if __name__ == "__main__":
    main()
