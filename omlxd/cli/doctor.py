"""`omlxd doctor`: checks the whole set-up and says what to do."""

from __future__ import annotations

import click

from omlxd.cli.context import Common, Exit, json_option, pass_common, show, show_json
from omlxd.cli.views import findings
from omlxd.doctor import examine


@click.command()
@json_option
@pass_common
def doctor(common: Common, as_json: bool) -> None:
    """Check the whole set-up; say what to do.

    Exit code 4 when something is.
    """
    found = examine(common.config_file, common.socket())
    if as_json:
        show_json({"findings": [one.as_dict() for one in found], "well": not any(one.wrong for one in found)})
    else:
        show(findings(found))
    if any(one.wrong for one in found):
        raise SystemExit(int(Exit.NOT_FOUND))
