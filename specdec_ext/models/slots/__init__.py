"""Models whose cache slots, attention masks and positions this package lays out itself.

- ``SlotTarget`` is the ``Target`` of such a model, composed of the following parts.
- ``RowLayout`` says where the text of each row lies in the slots of the cache.
- ``PassRunner`` turns a draft tree and the layout into one forward pass.
- ``Prefill`` checks the prompt and runs it.
- ``PromptPart`` is what it has computed for some tokens, for prompts that begin with the same ones.
- ``Replay`` restores recurrent states, which can't be cut to a length.
"""

from specdec_ext.models.slots.prompt_part import PromptPart
from specdec_ext.models.slots.target import SlotTarget

__all__ = ["PromptPart", "SlotTarget"]
