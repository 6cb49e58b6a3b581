"""``RecipeOption``: the options of a command from a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from specdec_ext.preflight.inputs import regular_file


def read_recipe(context: typer.Context, path: Path | None) -> Path | None:
    """Make the values of a recipe the defaults of the command's options.

    Raises:
        BadParameter: for a file that can't be read, is no mapping, or names an unknown option.
    """
    if path is None:
        return None
    try:
        values = yaml.safe_load(regular_file(path, "a YAML file").read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{path} can't be read: {error}") from error
    if not isinstance(values, dict):
        raise typer.BadParameter(f"{path} holds no mapping of options to values")
    known = {each.name: each for each in context.command.params if each.name != "recipe"}
    defaults: dict[str, Any] = {}
    for given, value in values.items():
        name = str(given).replace("-", "_")
        if name not in known:
            raise typer.BadParameter(
                f"{path} has {given!r}, which is no option; options are "
                f"{', '.join(sorted(filter(None, known)))}"
            )
        several = getattr(known[name], "multiple", False)
        defaults[name] = [value] if several and not isinstance(value, list) else value
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def recipe_of(context: typer.Context) -> str:
    """Return the options of the running command as a recipe, without those that are None."""
    values = {name: value for name, value in context.params.items() if name != "recipe"}
    return yaml.safe_dump(
        {name: _plain(value) for name, value in values.items() if value is not None},
        sort_keys=False,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


RecipeOption = Annotated[
    Path | None,
    typer.Option(
        "--recipe",
        is_eager=True,
        callback=read_recipe,
        help="YAML file with values of these options, named as here; options on the command line win.",
    ),
]
