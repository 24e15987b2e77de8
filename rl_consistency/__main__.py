"""`python -m rl_consistency`: the same as the `rl-consistency` command."""

import sys

from rl_consistency.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
