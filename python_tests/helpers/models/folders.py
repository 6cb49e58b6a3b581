"""The bundled pair as one folder, as it would be shared: with its head, a chat template and our code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from helpers.texts.chats import TEMPLATE

from specdec_ext import assets, write_custom_generate


def shared_folder(folder: Path, **defaults: object) -> Path:
    """Write the bundled target to ``folder`` and its head to a folder inside, named by the config.

    Args:
        defaults: as for :func:`write_custom_generate`.
    """
    shutil.copytree(assets.FOLDER / "tiny-python-target", folder)
    shutil.copytree(assets.FOLDER / "tiny-python-head", folder / "head")
    config = json.loads((folder / "config.json").read_text())
    config["specdec_ext_draft"] = "head"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    write_custom_generate(folder, **defaults)
    return folder
