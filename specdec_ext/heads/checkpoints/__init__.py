"""Read published formats of draft heads into ``DraftHead`` or ``MedusaHeads``, and write them."""

from specdec_ext.heads.checkpoints.export import ExportedHead, export_head
from specdec_ext.heads.checkpoints.load import is_draft, load_draft
from specdec_ext.heads.checkpoints.medusa import save_medusa
from specdec_ext.heads.checkpoints.pair import (
    check_pair,
    tokenizer_fingerprint,
    weights_fingerprint,
)
from specdec_ext.heads.checkpoints.save import save_draft

__all__ = [
    "ExportedHead",
    "check_pair",
    "export_head",
    "is_draft",
    "load_draft",
    "save_draft",
    "save_medusa",
    "tokenizer_fingerprint",
    "weights_fingerprint",
]
