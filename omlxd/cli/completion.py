"""`omlxd completion`: what a shell needs to complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from omlxd.cli.context import fail

FILES = {"bash": "~/.bashrc", "zsh": "~/.zshrc", "fish": "~/.config/fish/completions/omlxd.fish"}


@click.command()
@click.argument("shell", type=click.Choice(list(FILES)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script for SHELL.

    \b
    bash  omlxd completion bash >> ~/.bashrc
    zsh   omlxd completion zsh >> ~/.zshrc
    fish  omlxd completion fish > ~/.config/fish/completions/omlxd.fish
    """
    kind = get_completion_class(shell)
    root = ctx.find_root().command
    if kind is None:
        fail(f"there is no completion for {shell}")
    click.echo(kind(root, {}, "omlxd", "_OMLXD_COMPLETE").source())
