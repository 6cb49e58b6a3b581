"""``write_custom_generate``: a folder from which transformers loads our ``generate`` by itself.

With ``trust_remote_code=True``, transformers runs ``custom_generate/generate.py`` of a folder in place of
``model.generate``: for one call that names the folder, or for every call of a model that was loaded from it.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

from specdec_ext import __version__
from specdec_ext.display.text import did_you_mean
from specdec_ext.drafters.resolve import NAMES
from specdec_ext.generation import generate
from specdec_ext.heads.checkpoints.storage.hub import on_disk
from specdec_ext.hosts.replacement import check_defaults
from specdec_ext.keyword_table import ARGUMENTS, CONFIG
from specdec_ext.keywords import check_arguments
from specdec_ext.preflight.outputs import writable_folder

_FOLDER = "custom_generate"
_GENERATE = '''"""model.generate with speculative decoding: the same arguments, the same text, fewer passes.

transformers runs this file for model.generate(..., custom_generate=FOLDER, trust_remote_code=True), and for
every call of a model that was loaded from FOLDER with trust_remote_code=True.
"""

from specdec_ext.hosts import generate_function

generate = generate_function({arguments})
'''


def write_custom_generate(
    folder: str | Path,
    drafter: str | Path | None = "auto",
    *,
    overwrite: bool = False,
    **defaults: Any,
) -> list[Path]:
    """Write ``custom_generate/generate.py`` and ``requirements.txt``, with which transformers speculates.

    In the folder of a model, they replace ``generate`` of the model that
    ``from_pretrained(folder, trust_remote_code=True)`` loads, so that ``pipeline`` and ``transformers serve``
    speculate. For any model, ``model.generate(..., custom_generate=folder, trust_remote_code=True)`` does.
    All arguments of ``model.generate`` and of :func:`specdec_ext.generate` work, streamers included.

    Args:
        folder: folder of a model, or any other; it is created if it is missing.
        drafter: a name, folder or hub id, as in :func:`specdec_ext.generate`. A folder is written as an
            absolute path. To ship a head inside the folder of a model, name it in the model's config
            (``specdec_ext_draft``), where ``"auto"`` finds it.
        overwrite: replace existing files.
        **defaults: other arguments of :func:`specdec_ext.generate`, for calls that do not pass them, such as
            ``speculation="fixed"``. Texts, numbers, and lists, tuples and dicts of them can be written.

    Returns:
        The paths of both files.

    Raises:
        TypeError, ValueError: for arguments that are wrong for any prompt or can't be written to a file.
        OSError: for files that exist, a folder that can't be written, or a drafter that does not exist.
            Nothing is written if an error is raised.
    """
    for name, value in defaults.items():
        _check_written(name, value)
    check_arguments(defaults)
    check_defaults(drafter, defaults)
    arguments = {"drafter": _place(drafter), **defaults}
    target = Path(folder) / _FOLDER
    writable_folder(target, "folder")
    listed = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    contents = {
        target / "requirements.txt": f"specdec_ext>={__version__}\n",
        target / "generate.py": _GENERATE.format(arguments=listed),
    }
    existing = [str(path) for path in contents if path.exists()]
    if existing and not overwrite:
        raise FileExistsError(
            f"{' and '.join(existing)} exist already; choose another folder, or pass overwrite=True "
            "(--overwrite)"
        )
    target.mkdir(parents=True, exist_ok=True)
    for path, content in contents.items():
        path.write_text(content, "utf-8")
    return list(contents)


def _place(drafter: Any) -> str | None:
    """The drafter as a file can name it: a local path becomes absolute."""
    if drafter is None or drafter in NAMES:
        return drafter
    if not isinstance(drafter, (str, Path)):
        raise TypeError(
            f"drafter is a {type(drafter).__name__}, which can't be written to a file; expected one of "
            f"{list(NAMES)}, the folder or hub id of a draft head or a draft model, or None"
        )
    on_disk(drafter)  # refuses what is neither a path nor a hub id
    return str(Path(drafter).absolute() if Path(drafter).exists() else drafter)


def _check_written(name: str, value: Any) -> None:
    known = {*inspect.signature(generate).parameters, *ARGUMENTS, *CONFIG} - {"model", "kwargs"}
    if name not in known:
        meant = did_you_mean(name, sorted(known))
        raise ValueError(f"{name} is no argument of specdec_ext.generate{meant}")
    try:
        same = ast.literal_eval(repr(value)) == value
    except (SyntaxError, ValueError):
        same = False
    if not same:
        raise TypeError(
            f"{name} is a {type(value).__name__}, which can't be written to a file; expected texts, numbers, "
            "or lists, tuples and dicts of them. Pass it to each call, or use specdec_ext.install(model)"
        )
