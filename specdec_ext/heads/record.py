"""``HeadRecord``: what a checkpoint says about a head beyond its config and tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadRecord:
    """Facts from a checkpoint about a head, or about Medusa heads, that do not affect the computation.

    Attributes:
        format: name of the checkpoint format.
        layers_from: where ``HeadConfig.feature_layers`` comes from, in words.
        target_name: name of the target that the head was trained for.
        target_revision: commit of that target on the hub.
        target_fingerprint: fingerprint of the target's weights (``checkpoints.weights_fingerprint``).
        tokenizer_fingerprint: fingerprint of its tokenizer (``checkpoints.tokenizer_fingerprint``).
        ambiguous: fields of ``HeadConfig`` that the checkpoint states ambiguously, so their value is a guess.
        tied: whether the ``lm_head`` is an embedding that the head shares with the target.
        ignored: tensors in the file that the head does not use.
    """

    format: str = "none"
    layers_from: str = "HeadConfig"
    target_name: str | None = None
    target_revision: str | None = None
    target_fingerprint: str | None = None
    tokenizer_fingerprint: str | None = None
    ambiguous: tuple[str, ...] = ()
    tied: bool = False
    ignored: tuple[str, ...] = ()

    @property
    def made_for(self) -> str | None:
        """What is known of the target: its name, revision and fingerprint."""
        known = {
            "": self.target_name,
            "revision ": self.target_revision,
            "weights ": self.target_fingerprint,
        }
        return ", ".join(f"{what}{value}" for what, value in known.items() if value) or None
