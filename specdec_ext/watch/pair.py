"""``compare_pair``: whether a server has the target and the draft of a lock."""

from __future__ import annotations

from collections.abc import Iterator

from specdec_ext.display.text import counted, one_line
from specdec_ext.evaluate.benchmark.reply import message_of, parsed
from specdec_ext.rollout.lock import PairLock
from specdec_ext.watch.judge import Verdict

MOST = 3  # differences that are told


def compare_pair(lock: PairLock, status: int, answer: bytes) -> Verdict:
    """The verdict on what a server answers to ``GET /pair``; the answer is not trusted.

    Args:
        lock: the pair that is expected.
        status, answer: status and body of the answer.
    """
    if status != 200:
        hints = {404: "; only specdec serve has this page", 401: "; pass the server's --api-key"}
        return unverified(f"status {status}, {message_of(answer)}{hints.get(status, '')}")
    try:
        found = PairLock.from_record(parsed(answer), "/pair")
    except ValueError as error:
        return unverified(str(error))
    if differences := lock.differences_from(found):
        told = differences[:MOST]
        if more := len(differences) - len(told):
            told.append(f"and {counted(more, 'other difference')}")
        return Verdict("pair", "critical", one_line("; ".join(told)))
    told = ["target and draft are those of the lock", *_renamed(lock, found)]
    return Verdict("pair", "well", one_line("; ".join(told)))


def unverified(reason: str) -> Verdict:
    """The verdict on a server that does not tell its pair."""
    return Verdict("pair", "unknown", f"not verifiable: GET /pair: {one_line(reason)[:200]}")


def _renamed(lock: PairLock, found: PairLock) -> Iterator[str]:
    """What has the same files under another name or commit."""
    for what in ("target", "draft"):
        locked, now = getattr(lock, what), getattr(found, what)
        if locked is not None and now is not None and locked.described != now.described:
            yield f"the {what} is called {now.described}, not {locked.described}"
