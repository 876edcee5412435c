"""`omlxd install` and `omlxd uninstall`."""

from __future__ import annotations

from pathlib import Path

import click

from omlxd.cli.context import Common, fail, json_option, pass_common, show_json
from omlxd.config import GIB, Config
from omlxd.memory import memory
from omlxd.paths import log_path
from omlxd.service import Service, ServiceError, manager, this_command

PROCESS_BYTES = GIB  # the daemon's own memory besides the RAM tier: index, buffers, SSD pages being written


def service_of(common: Common, config: Config) -> Service:
    """What the service files say for this configuration on this machine."""
    ram = config.ram_bytes(memory()[0])
    return Service(
        command=this_command(),
        socket=common.socket(),
        log=log_path(),
        max_dirty=config.max_dirty_bytes(ram),
        memory_high=ram + PROCESS_BYTES,
        environment={"OMLXD_CONFIG": str(common.config_file), "OMLXD_SOCKET": str(common.socket())},
    )


@click.command()
@click.option("--start", is_flag=True, help="Start the daemon now, without waiting for the first engine.")
@json_option
@pass_common
def install(common: Common, start: bool, as_json: bool) -> None:
    """Run the daemon in the background, from now on.

    It becomes a LaunchAgent on macOS, a systemd user unit on Linux. The
    service manager listens on the socket and starts the daemon when the
    first engine connects. It starts it again after a crash, and not after a
    configuration error. Running this again updates the service files: do so
    after changing sizes, since they say how long stopping may take.

    \b
    omlxd install --start
    """
    service = service_of(common, common.config())
    used = manager()
    try:
        used.install(service, start=start)
    except (ServiceError, OSError) as error:
        if any(file.exists() for file in used.files):
            fail(f"the service is installed, but not as it should be: {error}\nomlxd uninstall removes it")
        fail(
            f"the service could not be installed, and nothing of it is left: {error}\nomlxd serve runs the daemon here"
        )
    if as_json:
        show_json({"manager": used.name, "files": list(used.files), "socket": service.socket, "started": start})
        return
    for file in used.files:
        click.echo(f"wrote {file}")
    click.echo(f"{used.name} listens on {service.socket}" + ("; the daemon is started" if start else ""))


@click.command()
@json_option
@pass_common
def uninstall(common: Common, as_json: bool) -> None:
    """Stop the service and remove its files. The store on the SSD stays."""
    try:
        removed = manager().uninstall()
    except ServiceError as error:
        fail(f"the service could not be removed: {error}")
    store = Path(common.config().ssd.path).expanduser()
    if as_json:
        show_json({"removed": removed, "store": store})
        return
    for file in removed:
        click.echo(f"removed {file}")
    click.echo(f"the store stays in {store}" if removed else "nothing was installed")
