"""``Reply``: the parts of a chat model's text: content, reasoning and tool calls.

Transformers parses them (``tokenizer.get_response_parser``), by the response template of the tokenizer or the
one that ``transformers serve`` has for the type of the model. Without a template, all text is content.
"""

from __future__ import annotations

import json
import logging
import uuid
from typing import Any

log = logging.getLogger(__name__)

_REASONING = ("reasoning_content", "reasoning", "thinking")  # names of templates for the same


def response_template(model: Any, tokenizer: Any) -> Any:
    """How the model writes tool calls and reasoning; None if transformers does not know it."""
    if not hasattr(tokenizer, "get_response_parser"):  # transformers before 5.20
        return None
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError:
        return getattr(tokenizer, "response_template", None)
    return get_response_template(tokenizer, model)


class Reply:
    """Divides a text that arrives in pieces.

    Args:
        tokenizer: the model's tokenizer.
        template: a response template; None takes all text for content.
        prompt: ids of the prompt, which may contain the beginning of the reply.
        tools: the tools of the request; their schemas decide the types of arguments.

    Attributes:
        has_called: whether the text so far has a tool call.
    """

    def __init__(self, tokenizer: Any, template: Any, prompt: list[int], tools: list[Any]):
        self.has_called = False
        self._num_calls = 0
        # The text after what was told, and how far the parser's events have followed it.
        self._untold, self._seen = "", 0
        self._parser = None
        if template is not None:
            self._parser = tokenizer.get_response_parser(
                template, prefix=tokenizer.decode(prompt), tools=tools or None
            )

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Add text; returns the gains of the message, in the form of OpenAI's ``delta``."""
        return self._parsed(text, is_end=False)

    def flush(self) -> list[dict[str, Any]]:
        """Return what was held back, after the last text."""
        return self._parsed("", is_end=True)

    def _parsed(self, text: str, is_end: bool) -> list[dict[str, Any]]:
        if self._parser is None:
            return [{"content": text}] if text else []
        self._untold += text
        try:
            events = self._parser.finalize()[1] if is_end else self._parser.feed(text)
            return [delta for event in events if (delta := self._delta(event)) is not None]
        except Exception as error:  # the text does not fit the template
            log.warning("the reply is not parsed: %s: %s", type(error).__name__, error)
            self._parser = None
            return [{"content": self._untold}] if self._untold else []

    def _delta(self, event: dict[str, Any]) -> dict[str, Any] | None:
        kind, name = event["type"], event.get("field")
        if kind == "region_close" and name == "tool_calls":
            self._tell()
            return self._call(event["value"])
        text = event.get("text") if kind == "region_chunk" else None
        if not text:
            return None
        self._seen = max(self._seen, self._untold.find(text, self._seen) + len(text))
        if event.get("dirty"):  # it is told when its region is complete
            return None
        self._tell()
        if name in _REASONING:
            return {"reasoning_content": text}
        return {"content": text} if name == "content" else None

    def _tell(self) -> None:
        self._untold, self._seen = self._untold[self._seen :], 0

    def _call(self, value: dict[str, Any]) -> dict[str, Any]:
        function = value["function"]
        arguments = function["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        call = {
            "index": self._num_calls,
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": function["name"], "arguments": arguments},
        }
        self._num_calls += 1
        self.has_called = True
        return {"tool_calls": [call]}
