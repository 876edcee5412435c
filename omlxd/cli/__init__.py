"""The command line, `omlxd`."""

from __future__ import annotations

import click

import omlxd


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(omlxd.__version__, prog_name="omlxd")
def main() -> None:
    """Keep the KV cache of local language models on this computer."""
