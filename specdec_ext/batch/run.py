"""``run_batch``: answers every line of a file, in their order, and goes on where an earlier run ended."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec_ext.batch.formats import BatchAnswer, BatchRequest, Format, format_of
from specdec_ext.batch.lines import Line, count_lines, read_lines
from specdec_ext.batch.output import OutputFile
from specdec_ext.display.progress import Work, tracked
from specdec_ext.display.text import counted
from specdec_ext.engine import AnyEngine
from specdec_ext.preflight.extras import require
from specdec_ext.preflight.inputs import regular_file
from specdec_ext.serve.app import create_app
from specdec_ext.serve.http.errors import ApiError
from specdec_ext.serve.service import Settings

# Number of lines per row of the engine that are in work or wait for the record of an earlier line. A long
# answer then leaves no row without work, and a run that is killed loses few answers.
LINES_PER_ROW = 4


@dataclass
class BatchReport:
    """What a run has done.

    Attributes:
        answered: number of lines with a text.
        failed: number of lines with an error.
        kept: number of these lines that earlier runs have answered.
    """

    answered: int = 0
    failed: int = 0
    kept: int = 0

    def __str__(self) -> str:
        lines = counted(self.answered + self.failed, "line")
        kept = f"; {self.kept:,} of them by earlier runs" if self.kept else ""
        return f"{lines}: {self.answered:,} answered, {self.failed:,} with an error{kept}"


def run_batch(
    engine: AnyEngine,
    requests: str | Path,
    answers: str | Path,
    settings: Settings,
    *,
    defaults: Mapping[str, Any] | None = None,
    seed: int | None = None,
    overwrite: bool = False,
) -> BatchReport:
    """Answer the requests of a file, with the endpoints of the server, in this process.

    Records have the order of the lines. If the file of answers has records already, it must be that of an
    earlier run for the same requests; its lines are kept, and a half-written last one is replaced. A line
    that can't be honoured gets a record with an error.

    Args:
        engine: an engine with a tokenizer and without ``max_waiting``; it is not shut down.
        requests: a JSONL file of prompts or in OpenAI's batch format, which may be untrusted.
        answers: the file for the records.
        settings: options of the server; ``max_body_bytes`` holds for lines. There is no key and no timeout.
        defaults: fields of plain prompts that leave them out, under the names of the server's fields.
        seed: the seed of the first plain prompt; that of the line after it is one more.
        overwrite: replace the records of an earlier run.

    Raises:
        ValueError: the file of answers is of another run, or the same as that of the requests; or the engine
            has ``max_waiting``.
        OSError: a file can't be read or written, or another run writes it.
        RuntimeError: the engine has ended; the records so far are kept. Or this thread has an event loop
            that runs.
    """
    requests, answers = regular_file(requests, "a file of requests"), Path(answers)
    if answers.exists() and answers.samefile(requests):
        raise ValueError(f"OUT {answers} is the file of the requests; choose another file")
    if engine.max_waiting is not None:
        raise ValueError(
            f"the engine refuses requests when max_waiting={engine.max_waiting} wait, and a file has more; "
            "leave max_waiting out"
        )
    most = settings.max_body_bytes
    # The size of a line is checked when it is read; as the body of a request it has another one.
    settings = replace(
        settings, api_key=None, request_timeout=float("inf"), max_body_bytes=sys.maxsize
    )
    form = format_of(read_lines(requests, most), defaults or {}, seed)
    report = BatchReport()
    with OutputFile(answers, form.start) as output:
        lines = read_lines(requests, most)
        if overwrite:
            output.clear()
        else:
            _keep(form, lines, output, report)
        total = count_lines(requests, most)
        with tracked("answering", total, "line", report.kept) as work:
            asyncio.run(_answer_all(engine, settings, form, lines, output, report, work))
    return report


def _keep(form: Format, lines: Iterator[Line], output: OutputFile, report: BatchReport) -> None:
    """Pass over the lines that have records."""
    for number, record in enumerate(output.records(), 1):
        line = next(lines, None)
        if line is None or not form.answers(record, line):
            raise output.foreign(number)
        _request(form, line)  # a later line must not have its custom_id
        report.kept += 1
        _count(form, record, report)
    output.repair()


async def _answer_all(
    engine: AnyEngine,
    settings: Settings,
    form: Format,
    lines: Iterator[Line],
    output: OutputFile,
    report: BatchReport,
    work: Work,
) -> None:
    http: Any = require("httpx2", "specdec batch")
    transport = http.ASGITransport(create_app(engine, settings), raise_app_exceptions=False)
    most = LINES_PER_ROW * engine.max_rows
    async with http.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as app:
        begun: deque[asyncio.Task[dict[str, Any]]] = deque()

        async def write_first() -> None:
            record = await begun.popleft()
            output.append(record)
            _count(form, record, report)
            work.advance(note=counted(report.failed, "error") if report.failed else "")

        try:
            for line in lines:
                record = _record(app, engine, form, line, _request(form, line))
                begun.append(asyncio.create_task(record))
                if len(begun) == most:
                    await write_first()
            while begun:
                await write_first()
        finally:
            for task in begun:
                task.cancel()
            await asyncio.gather(*begun, return_exceptions=True)


def _request(form: Format, line: Line) -> BatchRequest | ApiError:
    try:
        return form.request(line)
    except ApiError as error:
        return error


async def _record(
    app: Any, engine: AnyEngine, form: Format, line: Line, request: BatchRequest | ApiError
) -> dict[str, Any]:
    if isinstance(request, ApiError):
        return form.refusal(line, request)
    answer = await _answer(app, request)
    if answer.status >= 500 and not engine.is_open:  # it would fail for all further lines
        raise RuntimeError(f"line {line.number}: the engine has ended: {answer.body['error']}")
    return form.record(line, answer)


async def _answer(app: Any, request: BatchRequest) -> BatchAnswer:
    response = await app.post(
        request.url,
        content=json.dumps(request.body),
        headers={"Content-Type": "application/json"},
    )
    request_id = response.headers.get("X-Request-Id", "")
    return BatchAnswer(response.status_code, request_id, response.json())


def _count(form: Format, record: dict[str, Any], report: BatchReport) -> None:
    if form.has_failed(record):
        report.failed += 1
    else:
        report.answered += 1
