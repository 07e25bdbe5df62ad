"""``anyengine generate``: one engine, one request, its text."""

from __future__ import annotations

import dataclasses
import logging
import signal

import anyio
from anyio.abc import TaskStatus

from anyengine import (
    EngineClient,
    EngineError,
    EngineSpec,
    RequestError,
    SamplingParams,
    ShutdownPolicy,
    open_engine_client,
)
from anyengine.cli.terminal import Figures, LoadingBar, Terminal, TextOutput
from anyengine.text import ModelText
from anyengine.text.model_files import DEFAULT, model_directory

ENGINE = "anyengine.engines.transformers:TransformersEngine"

SHUTDOWN = ShutdownPolicy(grace=0.5, terminate=0.25)
"""Somebody waits at the prompt, and nothing in this engine is worth waiting for."""

CHUNK = 256
"""Tokens of a prompt that are computed in one step. An abort takes effect between steps, and Ctrl-C waits for it."""

MAX_TOKENS = 128
"""Tokens of an answer, where nobody says how many."""

BROKEN_PIPE = 128 + signal.SIGPIPE


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What to generate: ``model`` is a directory or ``"default"``, ``chat`` asks by the model's chat template.

    ``stop`` holds the stop strings, ``threads`` is the number of CPU threads (None: the engine's choice). With
    ``cuts_to_fit`` there may be fewer tokens than ``sampling`` asks for: those for which the model's length has room.
    """

    model: str
    prompt: str
    sampling: SamplingParams
    chat: bool
    stop: tuple[str, ...]
    threads: int | None = None
    cuts_to_fit: bool = False

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt as a chat."""
        return [{"role": "user", "content": self.prompt}]


def run(job: Job, backend: str) -> int:
    """Do the job and return the exit code: 0, 1 after an error, 128 + N after signal N."""
    # The client's warnings are for programs that go on. Here whatever matters ends the program, by an exception, and
    # that SHUTDOWN is shorter than some engine would like is no news.
    logging.getLogger("anyengine").setLevel(logging.ERROR)
    return anyio.run(_Generation(job).run, backend=backend)


class _Generation:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._terminal = Terminal()
        self._output = TextOutput()
        self._figures = Figures()
        self._signal: signal.Signals | None = None

    async def run(self) -> int:
        code = 0
        async with anyio.create_task_group() as group:
            scope = await group.start(self._await_signal)
            with scope:
                code = await self._generate_or_explain()
            group.cancel_scope.cancel()
        if self._signal is None:
            return code
        if self._figures.finish_reason is not None:
            pass  # the whole text is out, and so are its figures
        elif self._figures.sent_at is None:
            self._terminal.note(f"interrupted by {self._signal.name} before the request was sent")
        else:
            self._terminal.note(f"interrupted by {self._signal.name}: request aborted, {self._figures.describe()}")
        return 128 + self._signal

    async def _await_signal(self, *, task_status: TaskStatus[anyio.CancelScope]) -> None:
        """Cancel the scope on the first signal. Later ones change nothing: what happens then is bounded."""
        scope = anyio.CancelScope()
        # A signal that is ignored from the start (nohup, a shell's background job) stays ignored.
        wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        numbers = [number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN]
        with anyio.open_signal_receiver(*numbers) as signals:
            task_status.started(scope)
            async for number in signals:
                if self._signal is None:
                    self._signal = number
                    scope.cancel()
                    if self._figures.sent_at is not None:
                        self._output.end_line(echoed=number == signal.SIGINT)

    async def _generate_or_explain(self) -> int:
        try:
            await self._generate()
        except BrokenPipeError:
            return BROKEN_PIPE
        except (EngineError, OSError) as error:
            self._output.end_line()
            self._terminal.error(error)
            return 1
        return 0

    async def _generate(self) -> None:
        job = self._job
        directory = model_directory(job.model)
        text: ModelText | None = None
        if directory.is_dir():
            # Before the engine starts, if the files are there: what is wrong with them is known at once then.
            text = await ModelText.load(directory)
            if job.chat:
                text.encode_chat(job.messages)
        model = job.model if job.model == DEFAULT else str(directory)
        arguments = {"model": model, "max_num_seqs": 1, "max_num_batched_tokens": CHUNK}
        if job.threads is not None:
            arguments["num_threads"] = job.threads
        spec = EngineSpec(ENGINE, arguments)
        with LoadingBar(self._terminal) as bar:
            async with open_engine_client(spec, on_progress=bar.update, shutdown=SHUTDOWN) as client:
                if text is None:
                    text = await ModelText.load(directory)
                bar.close()
                await self._stream(client, text)
                self._output.end_line()
                self._terminal.note(self._figures.describe())

    async def _stream(self, client: EngineClient, text: ModelText) -> None:
        job = self._job
        prompt = job.messages if job.chat else job.prompt
        sampling = job.sampling
        if job.cuts_to_fit:
            tokens = text.encode_chat(job.messages) if job.chat else text.encode(job.prompt)
            room = client.info.max_model_len - len(tokens)
            if 0 < room < MAX_TOKENS:
                sampling = dataclasses.replace(sampling, max_tokens=room)
        self._figures.send()
        async with text.open_stream(client, prompt, sampling, stop=job.stop) as stream:
            try:
                async for output in stream:
                    self._figures.count(len(output.token_ids))
                    self._figures.finish_reason = output.finish_reason
                    await self._output.write(output.text)
            except RequestError as error:  # of which there is one, so that its number says nothing
                raise type(error)(str(error).removeprefix(f"request {stream.request_id}: ")) from error
