"""What `omlxd config init` writes."""

from __future__ import annotations

import textwrap

from omlxd.config import NamespaceRules, tables


def example() -> str:
    """A file with every setting at its default, commented out, with a line on what it does."""
    lines = [
        "# omlxd's configuration. Lines that start with # show the defaults.",
        "# Each [section] is there already: remove the # before a setting to change it.",
        "# Changes are applied while it runs; `omlxd config check` tells what is wrong.",
    ]
    for name, table in tables().items():
        lines += ["", *_comment(str(table.__doc__)), f"[{name}]"]
        defaults = table.model_validate({}).model_dump()
        for key, field in table.model_fields.items():
            lines += [*_comment(f"{key}: {field.description}"), f"# {key} = {_toml(defaults[key])}"]
    lines += ["", f"# {NamespaceRules.__doc__}", '# [namespace."org/name"]']
    for key, field in NamespaceRules.model_fields.items():
        shown = field.get_default() if field.get_default() is not None else _RULE_EXAMPLES[key]
        lines += [*_comment(f"{key}: {field.description}"), f"# {key} = {_toml(shown)}"]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    """In lines of at most 80 columns."""
    return textwrap.wrap(text, 80, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False)


_RULE_EXAMPLES = {"codec": "zstd-planes", "remote_ttl": "30d"}
"""For settings without a default of their own."""


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
