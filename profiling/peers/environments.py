"""Virtual environments of the peers, made from the package index by pip with its own settings."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from peers.process import Failed, log_tail
from peers.programs import Program

STAMP = "installed.txt"  # the requirements that an environment has


def python_of(name: str, program: type[Program], place: Path) -> Path:
    """The Python that runs a program; its environment is made if it is not there or has other requirements.

    A venv cannot be moved, so an unfinished one has no stamp instead of another name.

    Args:
        name: of the program.
        place: folder of all environments.

    Raises:
        Failed: if pip fails; the message has the end of its output.
    """
    if not program.requirements:
        return Path(sys.executable)
    folder = place / name
    python, stamp = folder / "bin" / "python", folder / STAMP
    wanted = "\n".join(program.requirements)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing {program.title} into {folder} ...", file=sys.stderr)
    venv.create(folder, clear=True, with_pip=True)
    log = folder / "pip.log"
    _pip(python, log, "install", *program.requirements)
    if program.unwanted:
        _pip(python, log, "uninstall", "--yes", *program.unwanted)
    stamp.write_text(wanted)
    return python


def _pip(python: Path, log: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", *arguments]
    with log.open("a") as file:
        ended = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT)
    if ended.returncode:
        raise Failed(f"{' '.join(command[2:])} failed:\n{log_tail(log)}")
