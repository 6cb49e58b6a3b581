"""``local_file``: a file of texts on the disk, or the copy of one from a dataset on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import hf_hub_download

from specdec_ext.preflight.inputs import regular_file

_ON_HUB = re.compile(r"hf://datasets/(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[^/]+))?/(?P<file>.+)")
SPELLING = "hf://datasets/ORG/NAME[@REVISION]/FILE"


def local_file(name: str | Path) -> Path:
    """Return the path of a file; a file on the hub is downloaded to the hub's cache once.

    Args:
        name: a path, or ``hf://datasets/ORG/NAME[@REVISION]/FILE``.

    Raises:
        OSError: for a file that does not exist or can't be downloaded, or a pipe or device.
        ValueError: for another spelling of ``hf://``.
    """
    if not str(name).startswith("hf:"):
        return regular_file(name, "a file of texts")
    found = _ON_HUB.fullmatch(str(name))
    if found is None:
        raise ValueError(f"{name} does not name a file of a dataset; expected {SPELLING}")
    repo, revision, file = found["repo"], found["revision"], found["file"]
    return Path(hf_hub_download(repo, file, repo_type="dataset", revision=revision))
