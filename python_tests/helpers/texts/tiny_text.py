"""A tokenizer of single characters for the tiny models, with chat templates of several kinds."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

END = "<|end|>"
CHARACTERS = [END, "\n", *map(chr, range(32, 127))]  # as many as tiny.VOCAB

_HEADS = "{%- for m in messages %}{{ '<' + m.role + '>' }}"
_PROMPT = "{%- endfor %}{%- if add_generation_prompt %}{{ '<assistant>' }}{%- endif %}"
_END = "{%- if m.role == 'assistant' %}{{ eos_token }}{%- endif %}{{ '\\n' }}"
PLAIN = _HEADS + "{{ m.content }}" + _END + _PROMPT
MARKED = (
    _HEADS
    + "{%- if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
    + "{%- else %}{{ m.content }}{%- endif %}{{ '\\n' }}"
    + _PROMPT
)
# Only the last message shows the thoughts of the assistant.
FORGETFUL = (
    _HEADS
    + "{%- if loop.last and m.role == 'assistant' %}{{ '(hm)' }}{%- endif %}{{ m.content }}"
    + _END
    + _PROMPT
)
# The assistant's turn does not begin with the prompt for it.
MISLEADING = PLAIN.replace("'<assistant>'", "'<model>'")
STRICT = (
    "{%- if messages[0].role != 'user' %}{{ raise_exception('user first') }}{%- endif %}" + PLAIN
)


def tiny_tokenizer(
    template: str | None = PLAIN, *, begins: bool = False
) -> PreTrainedTokenizerFast:
    """A token id is an index into ``CHARACTERS``; with ``begins``, each text begins with ``END``."""
    raw = Tokenizer(models.WordLevel({text: i for i, text in enumerate(CHARACTERS)}, END))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    raw.decoder = decoders.Fuse()
    if begins:
        raw.post_processor = processors.TemplateProcessing(
            single=f"{END} $A", special_tokens=[(END, 0)]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END, pad_token=END)
    tokenizer.chat_template = template
    return tokenizer
