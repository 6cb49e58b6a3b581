"""``ConfigFile``: the config.json of a model or a draft head, without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download

from specdec_ext.heads.checkpoints.config.eagle import head_config
from specdec_ext.heads.checkpoints.config.fields import Fields
from specdec_ext.heads.checkpoints.medusa import looks_like_medusa, medusa_config
from specdec_ext.heads.checkpoints.storage.files import StoredTensor, open_checkpoint, read_json
from specdec_ext.heads.checkpoints.storage.hub import on_disk
from specdec_ext.heads.checkpoints.storage.names import canonical_names, eagle_kind, is_head
from specdec_ext.heads.config import HeadConfig, Kind
from specdec_ext.heads.medusa import MedusaConfig

CONFIG = "config.json"
# More layers than any model has. A config is not trusted, and building a model takes time per layer.
MAX_LAYERS = 1024


@dataclass(frozen=True)
class ConfigFile:
    """A config.json.

    Attributes:
        source: path or hub id that the caller gave.
        path: the file.
        values: its contents.
    """

    source: str
    path: Path
    values: Mapping[str, Any]

    @classmethod
    def find(cls, name: str | Path) -> ConfigFile:
        """Find a config in a folder, as a file, or on the hub, from which only the config is downloaded.

        Raises:
            OSError: if there is none.
            ValueError: if it is not a JSON object, or names more layers than any model has.
        """
        place = on_disk(name)
        if place is None:
            place = Path(_downloaded(str(name)))
        path = place / CONFIG if place.is_dir() else place
        found = cls(str(name), path, read_json(path))
        if "num_hidden_layers" in found.fields:
            found.fields.integer("num_hidden_layers", low=0, high=MAX_LAYERS)
        return found

    @property
    def fields(self) -> Fields:
        return Fields(self.values, f"{self.source}: {CONFIG}")

    def head(self) -> HeadConfig | MedusaConfig | None:
        """Return the config of a draft head; None if this is a language model.

        If weights lie beside the file, the names and shapes of their tensors decide what the config does not
        tell. Otherwise the head is assumed to use the target's embedding.

        Raises:
            ValueError: for an unsupported kind of head, or contradictory fields.
        """
        tensors = self._tensors()
        if tensors is None:
            if "medusa_num_heads" in self.fields or self.fields.text("model_type") == "medusa":
                raise ValueError(
                    f"{self.source} describes Medusa heads, whose sizes only their weights tell; pass the "
                    "folder with the weights"
                )
            kind = self._kind()
            return None if kind is None else head_config(kind, self.fields, {})[0]
        if looks_like_medusa(tensors):
            return medusa_config(tensors, self.fields, self.source)
        names = canonical_names(tensors, self.source)
        if not is_head(names):
            return None
        shapes = {ours: tensors[theirs].shape for ours, theirs in names.items()}
        return head_config(eagle_kind(names, self.source), self.fields, shapes)[0]

    def _tensors(self) -> dict[str, StoredTensor] | None:
        """The tensors beside the config, which are not read; None if there are no weights."""
        if self.path.name != CONFIG:
            return None
        try:
            return open_checkpoint(self.path.parent).tensors
        except OSError:
            return None

    def _kind(self) -> Kind | None:
        """The kind of head that the config alone describes, None for other models."""
        fields = self.fields
        layout = fields.text("speculators_model_type")
        if layout is not None:
            return "mtp" if layout == "mtp" else "eagle3"
        named = any("eagle3" in name.lower() for name in fields.texts("architectures"))
        if named or "eagle_config" in fields or "draft_vocab_size" in fields:
            return "eagle3"
        # SafeAILab's EAGLE-1 configs are those of a Llama model of one layer, and have a field ``bias``.
        one_layer = fields.values.get("num_hidden_layers") == 1
        return "eagle1" if one_layer and "bias" in fields else None


def _downloaded(name: str) -> str:
    try:
        return hf_hub_download(name, CONFIG)
    except (OSError, ValueError) as error:
        raise OSError(
            f"{name!r} is neither a file nor a folder, and its {CONFIG} can't be downloaded from the hub: "
            f"{error}"
        ) from error
