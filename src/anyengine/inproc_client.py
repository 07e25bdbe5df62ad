"""``InprocEngineClient``: an engine in the caller's own process and thread, stepped by its caller."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self, Unpack

from anyengine.brief import brief
from anyengine.client.checks import (
    check_features,
    check_handles,
    check_options,
    check_pooling,
    check_request_id,
    check_sampling,
)
from anyengine.client.prompts import check_prompt
from anyengine.engine import contract
from anyengine.engine.control import SchedulerControl
from anyengine.engine.core import Deferred, EngineCore, engine_request
from anyengine.engine.failures import describe_failure, message_of
from anyengine.errors import (
    CrashReport,
    EngineClosedError,
    EngineDeadError,
    RequestError,
    RequestFailedError,
    RequestRefusedError,
    UtilityError,
)
from anyengine.forks import Origin
from anyengine.lengths import token_limit
from anyengine.params import PoolingParams, RequestKeywords, SamplingParams
from anyengine.protocol.error_kinds import kind_of
from anyengine.protocol.outputs import OutputDetails, StepOutputs, from_rows
from anyengine.types import EngineInfo
from anyengine.utilities import BlockingEngineUtilities

_DEFAULT_SAMPLING = SamplingParams()
_Row = tuple[int, Sequence[int], OutputDetails | None]
_clients: weakref.WeakSet[InprocEngineClient] = weakref.WeakSet()


class InprocEngineClient(BlockingEngineUtilities):
    """One engine without a process, a socket or a thread: it does something only while its caller calls it.

    Making the client loads the engine, and leaving its block (or :meth:`close`) shuts it down. Nothing is copied: an
    engine gets the caller's own arrays and arguments, which must stay as they are until the request has ended or the
    call has returned. Use a client from one thread, and not in a process that is forked from its own: there it is
    closed, and leaving it does nothing. What a process of its own protects from is not there: a crash of native code
    takes the caller along, and a step that hangs cannot be ended.

    An exception of the engine that belongs to one request or one call stays there. Any other, as one of a step, leaves
    the engine in an unknown state: this call and all later ones raise :class:`EngineDeadError` with its traceback.

    :param engine: the engine, not yet loaded
    :raises TypeError: if it is not an EngineCore
    :raises Exception: what the engine's ``load`` or ``describe`` raised
    """

    def __init__(self, engine: EngineCore) -> None:
        if not isinstance(engine, EngineCore):
            raise TypeError(f"engine={brief(engine)} ({type(engine).__name__}): expected an EngineCore object")
        contract.check_methods(type(engine))
        contract.load(engine, _report_nothing)
        self._live: set[int] = set()
        self._control = SchedulerControl(
            engine, live=self._live, release=self._release, refuse=self._refuse, can_wait=False, more={}
        )
        self._handles = itertools.count()
        self._ids: dict[int, str] = {}
        self._rows: list[_Row] = []
        self._known_handles: Sequence[int] = ()
        self._report: CrashReport | None = None
        self._closed = False
        self._origin = Origin()
        _clients.add(self)

    @property
    def info(self) -> EngineInfo:
        """What the engine says of itself."""
        return self._control.info

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Abort what is live and shut the engine down; every later call raises, except this one."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._report is None:
                self._control.abort_requests(list(self._live))
        finally:
            self._control.core.shutdown()

    # ---- requests ----

    def add_request(
        self,
        prompt_token_ids: Sequence[int] | None = None,
        sampling_params: SamplingParams = _DEFAULT_SAMPLING,
        *,
        prompt_embeds: Any = None,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[RequestKeywords],
    ) -> int:
        """One request; returns its handle, by which :meth:`get_output` names it.

        While the scheduler is paused the request is held, and should the engine refuse it later, its one row says so.

        :param prompt_token_ids: the prompt as token ids (u32)
        :param prompt_embeds: the prompt as a torch tensor or numpy array of shape [tokens, hidden size] instead
        :param pooling_params: asks for the pooled vector or scores of the prompt in place of tokens
        :param request_id: a name for logs and errors, free again when the request has ended
        :param options: what else the request asks for, see :class:`RequestKeywords`
        :raises TypeError: if an argument has the wrong type
        :raises RequestRefusedError: if the prompt is empty or holds an impossible token id, if ``max_tokens`` does not
            fit beside it, if a live request has the same id, or if the engine refuses the request
        :raises RequestFailedError: if the engine failed at it
        :raises EngineDeadError: if the engine is broken
        :raises EngineClosedError: if the client is closed
        """
        self._check_open()
        tokens = check_prompt(prompt_token_ids, prompt_embeds, self.info)
        pooling = None if pooling_params is None else check_pooling(pooling_params, self.info)
        checked = check_options(self.info, options, pooling)
        sampling = check_sampling(sampling_params, self.info)
        if pooling is None:
            token_limit(sampling, prompt_embeds.shape[0] if tokens is None else len(tokens), self.info.max_model_len)
        check_features(checked.features, tokens)
        if check_request_id(request_id) is not None and request_id in self._ids.values():
            raise RequestRefusedError(f"request_id={brief(request_id)}: a live request has this id")
        handle = next(self._handles)
        request = engine_request(handle, tokens, prompt_embeds, sampling, checked)
        try:
            self._control.add_request(request)
        except RequestError:
            raise
        except Exception as error:
            raise RequestFailedError(_problem(error)) from error
        self._live.add(handle)
        if request_id is not None:
            self._ids[handle] = request_id
        return handle

    def abort_requests(self, handles: Iterable[int]) -> None:
        """Abort requests; each has its last row in the next output. Those that have ended, or never were, are ignored.

        :raises TypeError: if ``handles`` does not hold integers
        :raises EngineDeadError: if the engine is broken, or breaks over this
        :raises EngineClosedError: if the client is closed
        """
        self._check_open()
        live = [handle for handle in dict.fromkeys(check_handles(handles)) if handle in self._live]
        try:
            self._control.abort_requests(live)
        except BaseException as error:
            self._break(error)

    def has_unfinished_requests(self) -> bool:
        """Whether a request is still to have its last row in an output. A paused engine makes no progress with it."""
        return bool(self._live or self._rows)

    def get_output(self) -> StepOutputs:
        """Make one step and return its outputs, in columns, after the last rows of what was aborted since the last one.

        There is no step if the engine is paused or has nothing to do. Each request has one row with a finish reason.

        :raises EngineDeadError: if the engine is broken, or breaks in this step
        :raises EngineClosedError: if the client is closed
        """
        if self._closed or self._report is not None:
            self._check_open()
        outputs: StepOutputs | None = None
        control = self._control
        try:
            if not control.has_work():
                for handle in control.forgotten():
                    self._end(handle, contract.forgotten(control.core))
            else:
                outputs = control.step()
                if outputs is not None and type(outputs) is not StepOutputs:
                    contract.check_step(control.core, outputs)
                if outputs is not None and not contract.is_sound(outputs):
                    outputs = contract.sound(control.core, outputs)
                if outputs is not None and (outputs.details or outputs.handles is not self._known_handles):
                    outputs = self._take(outputs)
        except BaseException as error:
            self._break(error)
        if self._rows:
            rows, self._rows = self._rows, []
            return from_rows(rows if outputs is None else [*rows, *outputs.rows()])
        return StepOutputs((), ()) if outputs is None else outputs

    # ---- utilities ----

    def call_utility(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Call a method that the engine marks ``@utility``; returns what it returned.

        :param timeout: there can be none here: the call runs in the caller's thread, where nothing can end it
        :raises TypeError: if ``method`` is not a string
        :raises ValueError: if ``timeout`` is not None
        :raises UtilityError: if the engine has no such utility, if the utility raised, or if it would answer in a later
            step, for nobody makes steps while the caller waits
        :raises EngineDeadError: if the engine is broken, or breaks over this
        :raises EngineClosedError: if the client is closed
        """
        if not isinstance(method, str):
            raise TypeError(f"method={brief(method)} ({type(method).__name__}): expected a string")
        if timeout is not None:
            raise ValueError(
                f"timeout={brief(timeout)}: a call of an in-process engine cannot be ended early; expected None"
            )
        self._check_open()
        if method not in self.info.utilities:
            known = ", ".join(self.info.utilities)
            raise UtilityError(method, f"engine {self.info.engine!r} has no such utility; it has {known}")
        try:
            value = self._control.call(method, args)
        except (Exception, SystemExit) as error:  # sys.exit() in a utility is that call's failure
            if self._control.broken:
                self._break(error)
            raise _failed(method, error) from error
        return _outcome(method, value) if isinstance(value, Deferred) else value

    # ---- what the engine's control asks for ----

    def _release(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self._end(handle, OutputDetails(finish_reason="abort"))

    def _refuse(self, handle: int, error: Exception) -> None:
        problem = message_of(error) if isinstance(error, RequestError) else _problem(error)
        self._end(handle, OutputDetails(finish_reason="error", error=problem, error_kind=kind_of(error)))

    def _end(self, handle: int, details: OutputDetails) -> None:
        self._rows.append((handle, (), details))
        self._forget(handle)

    def _forget(self, handle: int) -> None:
        self._live.discard(handle)
        self._ids.pop(handle, None)
        self._known_handles = ()

    def _take(self, outputs: StepOutputs) -> StepOutputs:
        """The rows of live requests; those whose last row is among them have ended."""
        handles = outputs.handles
        # A steady batch has the same column in each step: then there is nothing to look up.
        if handles != self._known_handles:
            if self._live.issuperset(handles):
                self._known_handles = handles
            else:
                outputs = outputs.select([handle in self._live for handle in handles])
        ended = [outputs.handles[row] for row, more in outputs.details.items() if more.finish_reason is not None]
        if ended:
            outputs.check_endings()
            for handle in ended:
                self._forget(handle)
        return outputs

    # ---- endings ----

    def _check_open(self) -> None:
        if self._origin.is_forked:
            raise EngineClosedError(
                f"the client and its engine belong to process {self._origin.pid}, and this is a fork of it, process "
                f"{os.getpid()}; make both here"
            )
        if self._closed:
            raise EngineClosedError("the client is closed")
        if self._report is not None:
            raise EngineDeadError(self._report)

    def _break(self, error: BaseException) -> NoReturn:
        """The engine is in an unknown state: nothing more is asked of it."""
        kind, problem, text = describe_failure(error)
        self._report = CrashReport(
            rank=0, pid=None, phase="serve", exception_type=kind, exception_message=problem, traceback=text
        )
        self._live.clear()
        self._ids.clear()
        if isinstance(error, Exception):
            raise EngineDeadError(self._report) from error
        raise error  # KeyboardInterrupt and the like are the caller's own


def _outcome(method: str, deferred: Deferred) -> Any:
    """What a utility that answers by a Deferred has answered."""
    outcomes: list[tuple[Any, BaseException | None]] = []
    deferred.on_settled(lambda value, error: outcomes.append((value, error)))
    if not outcomes:
        raise UtilityError(
            method,
            "it would answer in a later step, and nobody steps the engine while this call waits; what it began goes on "
            "with the next get_output(), but its answer is lost",
        )
    value, error = outcomes[0]
    if error is not None:
        raise _failed(method, error) from error
    return value


def _failed(method: str, error: BaseException) -> UtilityError:
    kind, problem, text = describe_failure(error)
    return UtilityError(method, problem, rank=0, exception_type=kind, traceback=text)


def _problem(error: Exception) -> str:
    kind, problem, _ = describe_failure(error)
    return f"{kind}: {problem}"


def _report_nothing(stage: str, fraction: float | None = None) -> None:
    pass


def _close_copies() -> None:
    # Closed and no more than that: an engine's shutdown may end what is its parent's, such as workers.
    for client in _clients:
        client._closed = True  # pyright: ignore[reportPrivateUsage]


os.register_at_fork(after_in_child=_close_copies)
