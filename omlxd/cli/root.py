"""The group that the commands hang on, and the options before them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import omlxd
from omlxd.cli import config, service
from omlxd.cli.context import Common, errors_as_exit_codes
from omlxd.paths import config_path


class Group(click.Group):
    """Commands in the order in which they were added; errors end as messages and exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of use, not of the alphabet."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with errors_as_exit_codes():
            return super().invoke(ctx)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.version_option(omlxd.__version__, prog_name="omlxd")
@click.option(
    "--config", "config_file", type=click.Path(path_type=Path), help="Configuration file. Also $OMLXD_CONFIG."
)
@click.option("--socket", help="The daemon's socket. Also $OMLXD_SOCKET.")
@click.pass_context
def main(ctx: click.Context, config_file: Path | None, socket: str | None) -> None:
    """Keep the KV cache of local language models on this computer.

    \b
    omlxd serve             run the daemon here
    omlxd install --start   run it in the background, from now on
    omlxd status            what it holds, and whether all is well
    omlxd doctor            when something is not

    Exit codes: 0 done, 1 refused, 2 wrong usage, 3 no daemon, 4 not found or
    not well, 78 wrong configuration.
    """
    ctx.obj = Common(config_file.absolute() if config_file else config_path(), socket)


for command in (service.install, service.uninstall, config.config):
    main.add_command(command)
