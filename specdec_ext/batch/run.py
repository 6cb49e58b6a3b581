"""``run_batch``: answers every line of a file, in their order, and goes on where an earlier run ended."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
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
        retried: number of these lines that had an error before.
    """

    answered: int = 0
    failed: int = 0
    kept: int = 0
    retried: int = 0

    def add(self, has_failed: bool, is_kept: bool) -> None:
        """Count the record of a line."""
        self.failed += has_failed
        self.answered += not has_failed
        self.kept += is_kept

    def __str__(self) -> str:
        lines = counted(self.answered + self.failed, "line")
        kept = f"; {self.kept:,} of them by earlier runs" if self.kept else ""
        retried = f"; {counted(self.retried, 'error')} tried again" if self.retried else ""
        return f"{lines}: {self.answered:,} answered, {self.failed:,} with an error{kept}{retried}"


def run_batch(
    engine: AnyEngine,
    requests: str | Path,
    answers: str | Path,
    settings: Settings,
    *,
    defaults: Mapping[str, Any] | None = None,
    seed: int | None = None,
    overwrite: bool = False,
    retry_errors: bool = False,
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
        retry_errors: answer the lines again whose record has an error. The records stay as they are until all
            of these lines are answered.

    Raises:
        ValueError: the file of answers is of another run, or the same as that of the requests; or the engine
            has ``max_waiting``.
        OSError: a file can't be read or written, or another run writes it.
        RuntimeError: the engine has ended; the records so far are kept. Or this thread has an event loop
            that runs.
    """
    with BatchFiles(
        requests,
        answers,
        settings.max_body_bytes,
        defaults or {},
        seed=seed,
        overwrite=overwrite,
        retry_errors=retry_errors,
    ) as files:
        return files.answer(engine, settings)


class BatchFiles:
    """The two files of a run, which are checked before there is an engine; a context manager.

    Nothing is written before :meth:`answer`, and no other run can write the answers meanwhile.

    Args:
        requests, answers, defaults, seed, overwrite, retry_errors: as for :func:`run_batch`.
        max_line_bytes: most bytes of a line.

    Raises:
        ValueError, OSError: as :func:`run_batch`.
    """

    def __init__(
        self,
        requests: str | Path,
        answers: str | Path,
        max_line_bytes: int,
        defaults: Mapping[str, Any],
        *,
        seed: int | None = None,
        overwrite: bool = False,
        retry_errors: bool = False,
    ):
        self._requests, self._most = regular_file(requests, "a file of requests"), max_line_bytes
        answers = Path(answers)
        if answers.exists() and answers.samefile(self._requests):
            raise ValueError(f"OUT {answers} is the file of the requests; choose another file")
        self._form = format_of(self._lines(), defaults, seed)
        self._overwrite = overwrite
        self._output = OutputFile(answers, self._form.start)
        self._num_kept = self._num_retried = 0
        try:
            for _, record in () if overwrite else self._kept():
                self._num_kept += 1
                self._num_retried += retry_errors and self._form.has_failed(record)
        except ValueError:
            self._output.close()
            raise

    def __enter__(self) -> BatchFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._output.close()

    def _lines(self) -> Iterator[Line]:
        return read_lines(self._requests, self._most)

    def _kept(self) -> Iterator[tuple[Line, dict[str, Any]]]:
        """The lines that have records, with these.

        Raises:
            ValueError: a record is not that of its line.
        """
        lines = self._lines()
        for number, record in enumerate(self._output.records(), 1):
            line = next(lines, None)
            if line is None or not self._form.answers(record, line):
                raise self._output.foreign(number)
            yield line, record

    def answer(self, engine: AnyEngine, settings: Settings) -> BatchReport:
        """Answer all lines that have no record yet; arguments and errors are those of :func:`run_batch`."""
        if engine.max_waiting is not None:
            raise ValueError(
                f"the engine refuses requests when max_waiting={engine.max_waiting} wait, and a file has "
                "more; leave max_waiting out"
            )
        # The size of a line is checked when it is read; as the body of a request it has another one.
        settings = replace(
            settings, api_key=None, request_timeout=float("inf"), max_body_bytes=sys.maxsize
        )
        output, form, report = self._output, self._form, BatchReport(retried=self._num_retried)
        total = count_lines(self._requests, self._most)
        if self._overwrite:
            output.clear()
        else:
            output.repair()
        done = 0 if self._num_retried else self._num_kept
        with tracked("answering", total, "line", done) as work:

            def answer(tasks: Iterable[_Task], to: OutputFile) -> None:
                asyncio.run(_answer_all(engine, settings, form, tasks, to, report, work))

            if self._num_retried:
                # Records are replaced all at once, so that a run that is killed loses none.
                with output.replacement() as fresh:
                    failed = form.has_failed
                    answer(((line, None if failed(r) else r) for line, r in self._kept()), fresh)
            else:
                for line, record in self._kept():
                    _request(form, line)  # a later line must not have its custom_id
                    report.add(form.has_failed(record), is_kept=True)
            rest = islice(self._lines(), self._num_kept, None)
            answer(((line, None) for line in rest), output)
        return report


# A line, and its record if an earlier run has answered it.
_Task = tuple[Line, dict[str, Any] | None]


async def _answer_all(
    engine: AnyEngine,
    settings: Settings,
    form: Format,
    tasks: Iterable[_Task],
    output: OutputFile,
    report: BatchReport,
    work: Work,
) -> None:
    http: Any = require("httpx2", "specdec batch")
    transport = http.ASGITransport(create_app(engine, settings), raise_app_exceptions=False)
    most = LINES_PER_ROW * engine.max_rows
    async with http.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as app:
        begun: deque[tuple[asyncio.Task[dict[str, Any]], bool]] = deque()

        async def write_first() -> None:
            task, is_kept = begun.popleft()
            record = await task
            output.append(record)
            report.add(form.has_failed(record), is_kept)
            work.advance(note=counted(report.failed, "error") if report.failed else "")

        try:
            for line, known in tasks:
                request = _request(form, line)
                record = _as_it_is(known) if known else _record(app, engine, form, line, request)
                begun.append((asyncio.create_task(record), known is not None))
                if len(begun) == most:
                    await write_first()
            while begun:
                await write_first()
        finally:
            for task, _ in begun:
                task.cancel()
            await asyncio.gather(*(task for task, _ in begun), return_exceptions=True)


async def _as_it_is(record: dict[str, Any]) -> dict[str, Any]:
    return record


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
