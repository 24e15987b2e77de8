from contextlib import ExitStack

import pytest


@pytest.fixture
def undo():
    """Callbacks and blocks that end with the test: changes to classes and to the process."""
    with ExitStack() as stack:
        yield stack
