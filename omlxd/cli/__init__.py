"""The command line, `omlxd`: a thin skin over the client and the store. One module a group of commands."""

from __future__ import annotations

from omlxd.cli.root import main

__all__ = ["main"]
