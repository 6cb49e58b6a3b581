"""The commands of a chat: lines that begin with ``/``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specdec_ext.cli.chat.conversation import Conversation, counts_table
from specdec_ext.display import Table
from specdec_ext.display.console import PlainConsole

# What a user types -> what it does.
HELP = {
    "/stats": "speed and acceptance of the last finished answer and of the session",
    "/reset": "forget all turns; the system prompt and the settings stay",
    "/system TEXT": "set the system prompt; without TEXT, remove it",
    "/seed N": "sample with this seed from the next answer on; without N, with another one each time",
    "/temperature X": "sample at this temperature from the next answer on; 0: decode greedily",
    "/help": "show the commands",
    "/exit": "leave, as does the end of the input (Ctrl-D)",
}


class Exit(Exception):
    """The user wants to leave."""


class Commands:
    """Runs the commands of a chat.

    Args:
        conversation: the conversation that they show and change.
        sampling: keywords of ``generate`` for the first answer, ``do_sample`` among them.
        console: what they print on.
    """

    def __init__(self, conversation: Conversation, sampling: dict[str, Any], console: PlainConsole):
        self._conversation, self._console = conversation, console
        self._samples: bool = sampling["do_sample"]
        self._options = {name: each for name, each in sampling.items() if name != "do_sample"}

    @property
    def sampling(self) -> dict[str, Any]:
        """The keywords of ``generate`` for the next answer."""
        return {"do_sample": self._samples, **(self._options if self._samples else {})}

    def run(self, line: str) -> None:
        """Run one command.

        Raises:
            ValueError: for an unknown command or a wrong argument.
            Exit: for ``/exit``.
        """
        name, _, argument = line.partition(" ")
        known: dict[str, Callable[[str], None]] = {
            shown.split()[0]: getattr(self, "_" + shown.split()[0][1:]) for shown in HELP
        }
        if name not in known:
            raise ValueError(
                f"{name} is no command; expected one of {', '.join(known)}. A message that begins with / is "
                "written with //"
            )
        argument = argument.strip()
        if argument and name in HELP:
            raise ValueError(f"{name} takes no argument, got {argument!r}")
        known[name](argument)

    def _stats(self, argument: str) -> None:
        if not self._conversation.last.answers:
            raise ValueError("/stats: there is no finished answer yet")
        counts = counts_table(self._conversation.last, self._conversation.session)
        self._console.blocks(counts, self._conversation.last.stats.explain())

    def _reset(self, argument: str) -> None:
        self._conversation.reset()
        self._console.sentence("All turns are forgotten.")

    def _system(self, argument: str) -> None:
        self._conversation.system = argument or None
        self._console.sentence(f"The system prompt is {'set' if argument else 'removed'}.")

    def _seed(self, argument: str) -> None:
        if not argument:
            self._options.pop("seed", None)
            self._console.sentence("Each answer has a seed of its own.")
            return
        self._options["seed"] = _number(int, "/seed", argument)
        greedy = "" if self._samples else ", as soon as /temperature makes it sample"
        self._console.sentence(f"The seed is {argument}{greedy}.")

    def _temperature(self, argument: str) -> None:
        temperature = _number(float, "/temperature", argument)
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"/temperature {argument}: expected 0 (greedy) or a positive number")
        self._samples = temperature > 0
        if self._samples:
            self._options["temperature"] = temperature
        self._console.sentence(
            f"The temperature is {temperature:g}." if self._samples else "Decoding is greedy."
        )

    def _help(self, argument: str) -> None:
        self._console.print(Table(list(HELP.items()), ("command", "")))

    def _exit(self, argument: str) -> None:
        raise Exit


def _number(kind: type, name: str, argument: str) -> Any:
    try:
        return kind(argument)
    except ValueError as error:
        noun = "an integer" if kind is int else "a number"
        raise ValueError(f"{name} {argument}: expected {noun}") from error
