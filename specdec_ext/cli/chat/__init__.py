"""``specdec chat``: talk to a model in the terminal, or answer the lines of standard input."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_ext.cli.chat.commands import Commands, Exit
from specdec_ext.cli.chat.conversation import Conversation, Messages
from specdec_ext.cli.shared.common import (
    DeviceOption,
    DrafterOption,
    DtypeOption,
    MaxNewTokensOption,
    ModelArgument,
    SpeculationOption,
    encode,
    load_drafter,
    load_target,
    user_errors,
)
from specdec_ext.cli.shared.sampling import (
    SampleOption,
    SeedOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    sampling_kwargs,
)
from specdec_ext.cli.shared.stream import TextStreamer, legend
from specdec_ext.display.console import PlainConsole
from specdec_ext.preflight.inputs import regular_file

if TYPE_CHECKING:
    import torch
    from torch import LongTensor
    from transformers import PreTrainedTokenizerBase

PROMPT = "> "


def chat(
    model: ModelArgument = None,
    drafter: DrafterOption = "auto",
    speculation: SpeculationOption = "auto",
    system: Annotated[str | None, typer.Option(help="System prompt of the conversation.")] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(help="File of a chat template (Jinja), in place of the model's own."),
    ] = None,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            help="Join the turns with line breaks, for models without a chat template.",
        ),
    ] = False,
    max_new_tokens: MaxNewTokensOption = 512,
    sample: SampleOption = False,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    seed: SeedOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Talk to a model: each line is a message; the text of an answer does not depend on the drafter.

    In a terminal, accepted drafts are marked by colour as they come, and Ctrl-C stops an answer. In a pipe,
    standard output gets the answers and nothing else. Lines that begin with / are commands; /help lists them.
    """
    if plain and chat_template is not None:
        raise typer.BadParameter(
            "--plain and --chat-template both form the prompt; pass one of them"
        )
    template = None
    if chat_template is not None:
        with user_errors("--chat-template"):
            template = regular_file(chat_template, "a chat template").read_text("utf-8")
    sampling = sampling_kwargs(sample, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    target, tokenizer = load_target(model, dtype, device)
    render = _rendering(tokenizer, target.device, template, plain)
    proposer = load_drafter(drafter, target, tokenizer)
    conversation = Conversation(target, render)
    conversation.system = system
    console, notes = PlainConsole(), PlainConsole(stderr=True)
    commands = Commands(conversation, sampling, notes)
    settings = dict(drafter=proposer, speculation=speculation, max_new_tokens=max_new_tokens)

    def answer(line: str) -> None:
        if line.startswith("/") and not line.startswith("//"):
            commands.run(line)
            return
        streamer = TextStreamer(console, tokenizer, mark_drafted=console.is_terminal)
        text = line.removeprefix("/") if line.startswith("//") else line
        try:
            conversation.ask(text, streamer, **settings, **commands.sampling)
        except BaseException:
            if streamer.text:
                streamer.end()
                console.print()
            raise
        console.print()
        if console.is_terminal and conversation.last.new_tokens == max_new_tokens:
            notes.sentence(
                f"The answer has reached --max-new-tokens {max_new_tokens}.", style="dim"
            )

    if not (sys.stdin.isatty() and console.is_terminal):
        _answer_lines(answer)
        return
    notes.print(legend(console))
    notes.sentence("/help lists the commands. Ctrl-C stops an answer.", style="dim")
    _answer_user(answer, notes)


def _answer_lines(answer: Callable[[str], None]) -> None:
    """Answer the lines of standard input; the first error ends the command."""
    with user_errors(), suppress(Exit):
        for line in map(str.strip, sys.stdin):
            if line:
                answer(line)


def _answer_user(answer: Callable[[str], None], notes: PlainConsole) -> None:
    """Answer a user at a terminal; neither an error nor Ctrl-C ends the conversation."""
    with suppress(ImportError):
        import readline  # noqa: F401  # edits lines and remembers them
    for line in _typed(notes):
        try:
            answer(line)
        except KeyboardInterrupt:
            notes.sentence("Stopped.", style="dim")
        except (ValueError, OSError) as error:
            notes.sentence(str(error), style="red")
        except Exit:
            return


def _typed(notes: PlainConsole) -> Iterator[str]:
    while True:
        try:
            line = input(PROMPT).strip()
        except EOFError:
            notes.print()
            return
        except KeyboardInterrupt:
            notes.sentence("\n/exit or Ctrl-D leaves.", style="dim")
            continue
        if line:
            yield line


def _rendering(
    tokenizer: PreTrainedTokenizerBase, device: torch.device, template: str | None, plain: bool
) -> Callable[[Messages], LongTensor]:
    """The function that turns messages into a prompt.

    Raises:
        BadParameter: for a template that can't be read, or a model without one.
    """
    if plain:
        return lambda messages: encode(tokenizer, _joined(messages), device)
    if template is not None:
        tokenizer.chat_template = template
        with user_errors("--chat-template"):
            _templated(tokenizer, [{"role": "user", "content": "a message"}], device)
    if tokenizer.chat_template is None:
        raise typer.BadParameter(
            "the model has no chat template; pass one with --chat-template FILE, or --plain, which joins the "
            "turns with line breaks",
            param_hint="MODEL",
        )
    return lambda messages: _templated(tokenizer, messages, device)


def _joined(messages: Messages) -> str:
    """The texts of all messages, each on lines of its own."""
    texts = (message["content"] for message in messages)
    return "".join(text if text.endswith("\n") else text + "\n" for text in texts)


def _templated(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, device: torch.device
) -> LongTensor:
    from jinja2 import TemplateError

    try:
        inputs: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except TemplateError as error:
        raise ValueError(f"the chat template can't render this conversation: {error}") from error
    ids: LongTensor = inputs["input_ids"].to(device)
    return ids
