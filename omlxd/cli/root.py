"""The group that the commands hang on, and the options before them."""

from __future__ import annotations

from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from typing import Any

import click

import omlxd
from omlxd.cli.context import Common, errors_as_exit_codes
from omlxd.paths import config_path

SECTIONS: dict[str, dict[str, str]] = {
    "Running it": {
        "serve": "running",
        "stop": "running",
        "install": "service",
        "uninstall": "service",
        "config": "config",
        "doctor": "doctor",
    },
    "Looking": {
        "status": "looking",
        "top": "looking",
        "ls": "blocks",
        "show": "blocks",
        "explain": "explaining",
        "events": "looking",
    },
    "Changing what it holds": {
        "clear": "changing",
        "rm": "changing",
        "flush": "changing",
        "pin": "keeping",
        "unpin": "keeping",
        "revoke": "keeping",
        "prefetch": "keeping",
        "get": "payloads",
        "put": "payloads",
    },
    "The store on the SSD": {
        "gc": "ssd",
        "verify": "ssd",
        "compact": "ssd",
        "export": "ssd",
        "import": "ssd",
    },
    "Trying policies and sizes": {
        "record": "recording",
        "replay": "replaying",
        "advise": "advising",
    },
    "More": {
        "completion": "completion",
    },
}
"""Commands by section: name, and the module of ``omlxd.cli`` that has it. A module is imported when it is needed."""

MODULES = {name: module for section in SECTIONS.values() for name, module in section.items()}


class Group(click.Group):
    """Finds commands in their modules; turns what they raise into messages and exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of use, not of the alphabet."""
        return list(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module."""
        module = MODULES.get(cmd_name)
        if module is None:
            return None
        function = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name
        command = getattr(import_module(f"omlxd.cli.{module}"), function)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by section."""
        width = max(map(len, MODULES))
        for title, names in SECTIONS.items():
            with formatter.section(title):
                rows = []
                for name in names:
                    command = self.get_command(ctx, name)
                    assert command is not None
                    rows.append((name.ljust(width), command.get_short_help_str(limit=66)))
                formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with errors_as_exit_codes():
            return super().invoke(ctx)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.version_option(omlxd.__version__, prog_name="omlxd")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="The file. Also $OMLXD_CONFIG.")
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
    not well, 78 wrong configuration, 130 interrupted.
    """
    ctx.obj = Common(
        config_file.absolute() if config_file else config_path(), socket, config_must_exist=config_file is not None
    )
