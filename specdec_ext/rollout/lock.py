"""``PairLock``: a target and its draft by the hashes of their files, with the acceptance that they had.

A fine-tuned target, or a head of another training run, gives correct texts and rejected drafts. The lock of a
pair that was measured says later whether the files are still those of that pair.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import specdec_ext
from specdec_ext.display import Summarised, Table
from specdec_ext.display.progress import tracked
from specdec_ext.drafters import Drafter
from specdec_ext.drafters.combined import CombinedDrafter
from specdec_ext.drafters.resolve import NAMES, resolve_drafter
from specdec_ext.heads.checkpoints.config.fields import Fields, shown
from specdec_ext.heads.checkpoints.storage.files import checkpoint_files, read_json
from specdec_ext.heads.config import DraftHead
from specdec_ext.heads.medusa import MedusaHeads
from specdec_ext.preflight.inputs import regular_file
from specdec_ext.pretrained import unwrapped
from specdec_ext.stats import SpeculationStats, consistent, reached_with_one_length
from specdec_ext.tree.config import MAX_NODES

FORMAT = 2  # of the file that is written
READABLE = (1, FORMAT)  # locks of format 1 have no ``reached_per_position``
SHOWN = 16  # digits of a hash, for people
MAX_COUNT = 2**53  # of a counter in the file
NO_DRAFTER = "none"

_POLICIES = ("auto", "fixed")
_HASH = re.compile(r"[0-9a-f]{64}")
_CACHED = re.compile(r"models--(.+)")  # folder of a repository in the hub's cache
_BLOCK = 1 << 20  # bytes that are read at a time

# What a target or a draft may be given as: a folder, a weight file, a hub id, or what was loaded of them.
Target = str | Path | PreTrainedModel
Draft = str | Path | PreTrainedModel | DraftHead | MedusaHeads | Drafter | None


@dataclass(frozen=True)
class LockedFiles:
    """The files of a target or a draft.

    Attributes:
        name: hub id, or own name of the folder.
        revision: commit on the hub; None for a folder of another origin.
        files: name of config.json and of each weight file -> SHA-256, 64 hexadecimal digits.
    """

    name: str
    revision: str | None
    files: Mapping[str, str]

    @classmethod
    def of(cls, place: str | Path, revision: str | None = None) -> LockedFiles:
        """Hash the files of a checkpoint.

        Args:
            place: folder, weight file or hub id.
            revision: branch, tag or commit on the hub.

        Raises:
            OSError, ValueError: if the files can't be found or read.
        """
        paths = checkpoint_files(place, revision)
        name, commit = _origin(str(place), paths[0].parent)
        total = sum(path.stat().st_size for path in paths)
        with tracked(f"hashing {name}", total, "byte") as work:
            files = {path.name: _sha256(path, work.advance) for path in paths}
        return cls(name, commit, files)

    @classmethod
    def read(cls, fields: Fields) -> LockedFiles:
        """Read the object that :meth:`record` returns; it is not trusted."""
        files = fields.section("files").values
        for name, digest in files.items():
            if (
                Path(name).name != name
                or not isinstance(digest, str)
                or not _HASH.fullmatch(digest)
            ):
                raise ValueError(
                    f"{fields.where}: files has {shown(name)}: {shown(digest)}; expected the name of a file "
                    "and its SHA-256, 64 hexadecimal digits"
                )
        if len(files) < 2:
            raise ValueError(
                f"{fields.where} has {len(files)} files; expected config.json and at least one weight file"
            )
        return cls(_needed_text(fields, "name"), fields.text("revision"), files)

    def record(self) -> dict[str, Any]:
        """The attributes, for JSON."""
        return asdict(self)

    @property
    def described(self) -> str:
        return self.name if self.revision is None else f"{self.name}, revision {self.revision}"

    def differences(self, found: LockedFiles, what: str) -> Iterator[str]:
        """A sentence for each file that differs in ``found``; names and revisions may differ.

        Args:
            found: the files that are there now.
            what: ``"target"`` or ``"draft"``, for the sentences.
        """
        for name in [*self.files, *(each for each in found.files if each not in self.files)]:
            locked, now = self.files.get(name), found.files.get(name)
            if locked == now:
                continue
            if now is None:
                yield f"{what} {found.described}: {name} is missing"
            elif locked is None:
                yield f"{what} {found.described}: {name} is not a file of {self.described}"
            else:
                yield (
                    f"{what} {found.described}: {name} has SHA-256 {now[:SHOWN]}..., that of "
                    f"{self.described} has {locked[:SHOWN]}..."
                )


@dataclass(frozen=True)
class ReferenceAcceptance:
    """The acceptance that a pair had when it was measured, as counts.

    Attributes:
        drafts: number of drafts.
        draft_tokens: their tokens.
        accepted_per_position: number of drafts whose first i tokens were all accepted, i = 1, 2, ...
        steps: number of steps, with and without drafts.
        emitted_tokens: tokens that these steps emitted.
        reached_per_position: number of drafts with a token at position i whose tokens before were all
            accepted; None if they were not counted, as in locks of format 1.
    """

    drafts: int
    draft_tokens: int
    accepted_per_position: tuple[int, ...]
    steps: int
    emitted_tokens: int
    reached_per_position: tuple[int, ...] | None = None

    @classmethod
    def of(cls, stats: SpeculationStats) -> ReferenceAcceptance:
        """The counts of calls, added up."""
        accepted = [count for count in stats.accepted_per_position if count]
        reached = tuple(stats.reached_per_position[: len(accepted)])
        return cls(
            stats.drafts,
            stats.draft_tokens,
            tuple(accepted),
            stats.steps,
            stats.emitted_tokens,
            reached if consistent(stats.drafts, reached, accepted) else None,
        )

    @classmethod
    def read(cls, fields: Fields) -> ReferenceAcceptance:
        """Read the object that :meth:`record` returns; it is not trusted."""
        drafts, draft_tokens, steps, emitted = (
            fields.integer(name, low=0, high=MAX_COUNT)
            for name in ("drafts", "draft_tokens", "steps", "emitted_tokens")
        )
        accepted = fields.integers("accepted_per_position") or []
        counted = fields.integers("reached_per_position")
        reached = reached_with_one_length(drafts, accepted) if counted is None else counted
        if (
            len(accepted) >= MAX_NODES
            or not consistent(drafts, reached, accepted)
            or sum(accepted if counted is None else counted) > draft_tokens
            or drafts > steps
        ):
            raise ValueError(
                f"{fields.where}: accepted_per_position is {shown(accepted)} and reached_per_position "
                f"{shown(counted)}, of {drafts} drafts with {draft_tokens} tokens in {steps} steps; expected "
                "counts that never rise, from the number of drafts on, as many of one as of the other, and "
                "not more drafts than steps"
            )
        known = None if counted is None else tuple(counted)
        return cls(drafts, draft_tokens, tuple(accepted), steps, emitted, known)

    def record(self) -> dict[str, Any]:
        """The attributes, for JSON."""
        return asdict(self)

    @property
    def accepted_tokens(self) -> int:
        return sum(self.accepted_per_position)

    @property
    def reached(self) -> Sequence[int]:
        """``reached_per_position``; if they were not counted, as many as if all drafts had one length."""
        if self.reached_per_position is not None:
            return self.reached_per_position
        return reached_with_one_length(self.drafts, self.accepted_per_position)

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of drafts whose first i tokens were accepted, i = 1, 2, ... (unconditional).

        Empty without drafts.
        """
        return [count / self.drafts for count in self.accepted_per_position if self.drafts]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per draft, with the bonus or correction token; 1.0 without drafts."""
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    @property
    def emitted_per_step(self) -> float:
        """Tokens per step, with and without drafts."""
        return self.emitted_tokens / self.steps if self.steps else 1.0


@dataclass(frozen=True, repr=False)
class PairLock(Summarised):
    """A target, its draft and their acceptance; one JSON file, ``pair.lock``.

    Attributes:
        target: the files of the target.
        draft: those of the draft head or draft model; None for a drafter without files of its own.
        drafter: the kind of drafter, such as ``"NgramDrafter + HeadDrafter"``; ``"none"`` without drafts,
            None if the draft was locked without a loaded target.
        speculation: ``"auto"`` or ``"fixed"``, as the reference was measured.
        reference: the acceptance of the pair; None if it was not measured.
        sampling: what was generated for the reference, such as ``{"temperature": 0.0}``.
        versions: of this package, torch and transformers.
    """

    target: LockedFiles
    draft: LockedFiles | None
    drafter: str | None
    speculation: str = "auto"
    reference: ReferenceAcceptance | None = None
    sampling: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        target: Target,
        draft: Draft = "auto",
        *,
        speculation: str = "auto",
        reference: ReferenceAcceptance | SpeculationStats | None = None,
        sampling: Mapping[str, str | int | float | bool] | None = None,
    ) -> PairLock:
        """Lock a pair by hashing its files.

        Weights that were changed after loading are not seen.

        Args:
            target: a loaded model, or its folder or hub id.
            draft: as ``drafter`` of :func:`specdec_ext.generate`. Names such as ``"auto"`` need a loaded
                target. Of a head that was loaded with ``revision=...``, pass the folder.
            speculation: ``"auto"`` or ``"fixed"``.
            reference: the acceptance; the statistics of calls are converted.
            sampling: the settings with which it was measured.

        Raises:
            ValueError: if the target or the draft was made in memory and has no files.
            OSError: if files are missing.
        """
        files, kind = _files_of_draft(draft, target)
        if isinstance(reference, SpeculationStats):
            reference = ReferenceAcceptance.of(reference)
        versions = {
            "specdec_ext": specdec_ext.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        return cls(
            _files_of_target(target),
            files,
            kind,
            speculation,
            reference,
            dict(sampling or {}),
            versions,
        )

    @classmethod
    def load(cls, path: str | Path) -> PairLock:
        """Read a lock; the file is not trusted.

        Raises:
            OSError: if it can't be read.
            ValueError: if it is no lock; the message names the place.
        """
        return cls.from_record(read_json(regular_file(path, "a lock of a pair")), str(path))

    @classmethod
    def from_record(cls, record: Mapping[str, Any], where: str) -> PairLock:
        """The lock of the JSON object that :meth:`record` returns.

        Args:
            record: the object; it is not trusted.
            where: its name in messages.

        Raises:
            ValueError: if it is no lock.
        """
        fields = Fields(record, where)
        if fields.values.get("pair_lock") not in READABLE:
            raise ValueError(
                f"{where}: pair_lock is {shown(fields.values.get('pair_lock'))}; expected {FORMAT}, as "
                "specdec rollout and PairLock.save write it, or 1. A larger number is that of a later "
                "version of specdec_ext"
            )
        speculation = fields.text("speculation")
        if speculation not in _POLICIES:
            raise ValueError(
                f"{where}: speculation is {shown(speculation)}; expected one of {list(_POLICIES)}"
            )
        return cls(
            LockedFiles.read(fields.section("target")),
            LockedFiles.read(fields.section("draft")) if "draft" in fields else None,
            fields.text("drafter"),
            speculation,
            ReferenceAcceptance.read(fields.section("reference"))
            if "reference" in fields
            else None,
            _scalars(fields.section("sampling"), (str, int, float, bool)),
            _scalars(fields.section("versions"), (str,)),
        )

    def save(self, path: str | Path) -> Path:
        """Write the lock, and return its path."""
        path = Path(path)
        path.write_text(json.dumps(self.record(), indent=1) + "\n", "utf-8")
        return path

    def record(self) -> dict[str, Any]:
        """The content of the file."""
        return {
            "pair_lock": FORMAT,
            "target": self.target.record(),
            "draft": self.draft and self.draft.record(),
            "drafter": self.drafter,
            "speculation": self.speculation,
            "reference": self.reference and self.reference.record(),
            "sampling": dict(self.sampling),
            "versions": dict(self.versions),
        }

    def differences(
        self, target: Target | None, draft: Draft = "auto", speculation: str | None = None
    ) -> list[str]:
        """A sentence for each difference between the lock and a pair; [] for the locked one.

        Args:
            target: as for :meth:`of`; None compares the draft alone.
            draft: as for :meth:`of`. If the target is a loaded model, or this is a drafter, the kind of the
                drafter is compared, too.
            speculation: ``"auto"`` or ``"fixed"``; None does not compare it.

        Raises:
            ValueError, OSError: as :meth:`of`.
        """
        files, kind = _files_of_draft(draft, target)
        of_target = None if target is None else _files_of_target(target)
        return list(self._differences(of_target, files, kind, speculation))

    def differences_from(self, other: PairLock) -> list[str]:
        """A sentence for each difference between this lock and another one, such as that of a server.

        The reference, the sampling and the versions may differ.
        """
        return list(self._differences(other.target, other.draft, other.drafter, other.speculation))

    def _differences(
        self,
        target: LockedFiles | None,
        draft: LockedFiles | None,
        drafter: str | None,
        speculation: str | None,
    ) -> Iterator[str]:
        """The differences from what was found; None, but for a draft, does not compare."""
        if target is not None:
            yield from self.target.differences(target, "target")
        if None not in (drafter, self.drafter) and drafter != self.drafter:
            yield f"the drafter is {drafter}, not {self.drafter}"
        if self.draft is not None and draft is not None:
            yield from self.draft.differences(draft, "draft")
        elif self.draft is not None:
            yield f"there is no draft with files, such as {self.draft.described}"
        elif draft is not None:
            yield f"draft {draft.described} is not part of the lock"
        if speculation not in (None, self.speculation):
            yield f"speculation is {speculation}, not {self.speculation}"

    def verify(
        self, target: Target | None, draft: Draft = "auto", speculation: str | None = None
    ) -> None:
        """Refuse any pair but the locked one.

        Args:
            target, draft, speculation: as for :meth:`differences`.

        Raises:
            ValueError: with all differences; or as :meth:`of`.
            OSError: as :meth:`of`.
        """
        if found := self.differences(target, draft, speculation):
            raise ValueError(f"this is not the locked pair: {'; '.join(found)}")

    def summary(self) -> str:
        parts = (self.drafter, self.draft and self.draft.described)
        draft = " ".join(part for part in parts if part)
        measured = "not measured"
        if self.reference is not None:
            measured = f"mean acceptance length {self.reference.mean_acceptance_length:.2f}"
        return f"{self.target.described} with {draft}, {self.speculation}: {measured}"

    def tables(self) -> Iterable[Table]:
        parts = {"target": self.target, "draft": self.draft}
        yield Table(
            [
                (what if number == 0 else "", name, f"{digest[:SHOWN]}...")
                for what, part in parts.items()
                if part is not None
                for number, (name, digest) in enumerate(part.files.items())
            ],
            ("", "file", "SHA-256"),
        )
        if self.reference is not None and self.reference.drafts:
            found = self.reference
            counts = zip(
                found.reached,
                found.accepted_per_position,
                found.acceptance_per_position,
                strict=True,
            )
            counted = found.reached_per_position is not None
            yield Table(
                [
                    (
                        str(position),
                        f"{reached:,}",
                        f"{accepted:,}",
                        f"{accepted / reached:.0%}",
                        f"{share:.0%}",
                    )
                    for position, (reached, accepted, share) in enumerate(counts, 1)
                    if reached
                ],
                (
                    "position",
                    "reached" if counted else "reached at most",
                    "accepted",
                    "of those",
                    "of all drafts",
                ),
            )


def _files_of_target(target: Target) -> LockedFiles:
    if isinstance(target, (str, Path)):
        return LockedFiles.of(target)
    return _files_of_model(target, "target")


def _files_of_model(model: Any, what: str) -> LockedFiles:
    config = unwrapped(model).config
    place = str(getattr(config, "_name_or_path", "") or "")
    if not place:
        raise ValueError(
            f"the {what} was made in memory and has no files to hash; save it with save_pretrained, and load "
            "it from there"
        )
    return LockedFiles.of(place, getattr(config, "_commit_hash", None))


def _files_of_draft(draft: Draft, target: Target | None) -> tuple[LockedFiles | None, str | None]:
    """The files of a draft, and the kind of its drafter; None for that of a checkpoint alone."""
    if target is not None and not isinstance(target, (str, Path)):
        draft = resolve_drafter(draft, target)
    if draft is None or draft == NO_DRAFTER:
        return None, NO_DRAFTER
    if isinstance(draft, Drafter):
        return _files_of_drafter(draft), _kind(draft)
    if isinstance(draft, (DraftHead, MedusaHeads)):
        return _files_of_head(draft), None
    if not isinstance(draft, (str, Path)):
        return _files_of_model(draft, "draft model"), None
    if draft in NAMES:
        raise ValueError(
            f"draft={draft!r} depends on the model; pass the loaded target, or the folder or hub id of the "
            "draft"
        )
    return LockedFiles.of(draft), None


def _files_of_drafter(drafter: Drafter) -> LockedFiles | None:
    if isinstance(drafter, CombinedDrafter):
        return _files_of_drafter(drafter.model_based)
    for name in ("head", "heads"):
        if isinstance(head := getattr(drafter, name, None), (DraftHead, MedusaHeads)):
            return _files_of_head(head)
    model = getattr(drafter, "model", None)
    return _files_of_model(model, "draft model") if isinstance(model, PreTrainedModel) else None


def _files_of_head(head: DraftHead | MedusaHeads) -> LockedFiles:
    try:
        return LockedFiles.of(head.source)
    except OSError as error:
        raise ValueError(
            f"the draft head {head.source!r} has no files to hash ({error}); save it with save_draft, and "
            "load it from there"
        ) from error


def _kind(drafter: Drafter) -> str:
    if isinstance(drafter, CombinedDrafter):
        return f"{_kind(drafter.retrieval)} + {_kind(drafter.model_based)}"
    return type(drafter).__name__


def _origin(place: str, folder: Path) -> tuple[str, str | None]:
    """The name of a checkpoint, and its commit if its folder belongs to the hub's cache."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots" and (
        cached := _CACHED.fullmatch(folder.parent.parent.name)
    ):
        return cached.group(1).replace("--", "/"), folder.name
    return (folder.name if Path(place).exists() else place), None


def _sha256(path: Path, advance: Any) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


def _needed_text(fields: Fields, name: str) -> str:
    found = fields.text(name)
    if not found:
        raise ValueError(f"{fields.where} has no {name}; expected a string")
    return found


def _scalars(fields: Fields, types: Sequence[type]) -> dict[str, Any]:
    for name, value in fields.values.items():
        if type(value) not in types:
            expected = " or ".join(each.__name__ for each in types)
            raise ValueError(
                f"{fields.where}: {shown(name)} is {shown(value)}; expected a value of type {expected}"
            )
    return dict(fields.values)
