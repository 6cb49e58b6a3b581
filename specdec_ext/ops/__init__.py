"""The compiled ops, ``torch.ops.specdec.*``, as documented Python functions.

Importing this package loads the op library and registers fake (meta) implementations, so the ops work with
``torch.compile`` and ``torch.export``. Every op has a specification in plain PyTorch under
``specdec_ext.reference``, with the same name and arguments, except that ``draft_head`` takes a packed head.
The schemas are in ``csrc/ops/schemas.cpp``.

Shapes: ``batch`` is the number of rows, ``nodes`` the number of nodes per row (1 to 1024, with the root) and
``vocab`` the number of tokens. All index tensors are int64. ``parents[b, i] < i``, with -1 for the root (node
0) and -2 for an inactive node. A node whose parent is not an earlier active node is inactive; a row whose
node 0 is inactive is inactive.

Errors: a ValueError names the argument, what was expected and what was given.
"""

from specdec_ext.ops._library import LIBRARY_PATH
from specdec_ext.ops.adjust_logits import MAX_ADJUSTMENTS, Adjustment, adjust_logits
from specdec_ext.ops.build_dynamic_tree import DynamicTree, build_dynamic_tree
from specdec_ext.ops.couple_logits import DraftNoise, couple_logits
from specdec_ext.ops.decoder_layers import DecoderStates, decoder_layers
from specdec_ext.ops.draft_head import HeadDraft, draft_head
from specdec_ext.ops.draft_limits import draft_head_refusal
from specdec_ext.ops.kv_compact import kv_compact
from specdec_ext.ops.linear import cpu_instructions, linear
from specdec_ext.ops.merge_trees import MergedTrees, merge_trees
from specdec_ext.ops.ngram_draft import NgramDraft, ngram_draft
from specdec_ext.ops.packed_head import PackedHead
from specdec_ext.ops.round_commit import (
    MAX_FEATURE_TENSORS,
    STATUS_ILLEGAL_NUMBERS,
    RoundEntry,
    RoundNumbers,
    round_commit,
)
from specdec_ext.ops.sample_filter import sample_filter
from specdec_ext.ops.tree_attention import tree_attention, tree_attention_refusal
from specdec_ext.ops.tree_mask import TreeMask, tree_mask
from specdec_ext.ops.verify_match import (
    STATUS_NAN,
    STATUS_NO_FINITE_LOGIT,
    STATUS_OK,
    HostMatchResult,
    MatchResult,
    verify_match,
)
from specdec_ext.ops.verify_sampled import verify_block, verify_recursive, verify_rejection
from specdec_ext.tree.config import MAX_CANDIDATES, MAX_NODES

__all__ = [
    "LIBRARY_PATH",
    "MAX_ADJUSTMENTS",
    "MAX_CANDIDATES",
    "MAX_FEATURE_TENSORS",
    "MAX_NODES",
    "STATUS_ILLEGAL_NUMBERS",
    "STATUS_NAN",
    "STATUS_NO_FINITE_LOGIT",
    "STATUS_OK",
    "Adjustment",
    "DecoderStates",
    "DraftNoise",
    "DynamicTree",
    "HeadDraft",
    "HostMatchResult",
    "MatchResult",
    "MergedTrees",
    "NgramDraft",
    "PackedHead",
    "RoundEntry",
    "RoundNumbers",
    "TreeMask",
    "adjust_logits",
    "build_dynamic_tree",
    "couple_logits",
    "cpu_instructions",
    "decoder_layers",
    "draft_head",
    "draft_head_refusal",
    "kv_compact",
    "linear",
    "merge_trees",
    "ngram_draft",
    "round_commit",
    "sample_filter",
    "tree_attention",
    "tree_attention_refusal",
    "tree_mask",
    "verify_block",
    "verify_match",
    "verify_recursive",
    "verify_rejection",
]
