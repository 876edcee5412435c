from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Take Ctrl-C as a terminal gives it: a shell that starts the tests in the background has it ignored in all of them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
