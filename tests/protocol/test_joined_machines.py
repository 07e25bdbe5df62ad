"""Both machines joined in memory: any order of calls, steps, deliveries, losses and deaths keeps the promises.

- Each waiter is resolved exactly once: by its last row, its release, its answer, or the engine's death.
- What it gets are the engine's tokens in their order, without a gap, up to its end, and nothing behind that.
- A message that is lost on the way is noticed, on both ways.
- When all is over, no table on either side holds anything.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.protocol.machines import INFO, RANK, SESSION, TOKEN
from tests.protocol.strategies import THOROUGHNESS, arrived

from anyengine.errors import ProtocolError, UnencodableError
from anyengine.params import SamplingParams
from anyengine.protocol import client_machine as client_side
from anyengine.protocol import engine_machine as engine_side
from anyengine.protocol.client_machine import ClientMachine, ClientState
from anyengine.protocol.engine_machine import EngineMachine, EngineState
from anyengine.protocol.messages import MessageLostError, decode_from_engine
from anyengine.protocol.outputs import OutputDetails, StepOutputs, from_rows
from anyengine.protocol.replies import Dead, Goodbye, Outputs, Pong, Stats, Tokens, UtilityResult
from anyengine.protocol.requests import Ping
from anyengine.protocol.sampling import NO_OPTIONS

Message = list[bytes | memoryview]
Row = tuple[int, list[int], OutputDetails | None]
UP = (ClientState.SERVING, ClientState.CLOSING)
rarely = st.integers(0, 7).map(lambda number: number == 7)
ANSWERING = (EngineState.SERVING, EngineState.DRAINING)


class Waiter:
    """Whoever waits for a request or a call."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tokens: list[int] = []
        self.aborted = False
        self.end: str | None = None

    def take(self, tokens: list[int]) -> None:
        assert self.end is None, f"{self.name} got tokens after its end by {self.end}"
        assert not self.aborted, f"{self.name} got tokens after its abort"
        self.tokens += tokens

    def resolve(self, how: str) -> None:
        assert self.end is None, f"{self.name} was resolved by {self.end} and again by {how}"
        self.end = how

    def __repr__(self) -> str:
        return f"<{self.name} {self.end}>"


class Link(RuleBasedStateMachine):
    """A client and an engine, with everything between them in the hands of the test."""

    def __init__(self) -> None:
        super().__init__()
        self.client: ClientMachine[Waiter] = ClientMachine(
            rank=RANK, token=TOKEN, session=SESSION, handles=itertools.count(1)
        )
        self.engine = EngineMachine(rank=RANK, token=TOKEN)
        self.alive = True
        # The wires. Messages carry the number of counted ones before them, so that the test knows of a loss by itself.
        self.to_engine: deque[tuple[int, bool, Message]] = deque()
        self.dealer: deque[Message] = deque()
        self.push: deque[tuple[int, Message]] = deque()
        self.counted_out = self.counted_in = 0
        self.pushed_out = self.pushed_in = 0
        self.last_handles: Any = ()
        # The engine's application.
        self.running: list[int] = []
        self.unanswered: list[int] = []
        self.steps = 0
        self.tokens = itertools.count()
        self.generated: dict[int, list[int]] = {}
        # What the client's application waits for.
        self.requests: dict[int, Waiter] = {}
        self.calls: dict[int, Waiter] = {}
        self.forgotten: set[int] = set()

    # ---- the wires ----

    def client_sends(self, frames: Any, *, counted: bool = True) -> None:
        if self.alive:
            self.to_engine.append((self.counted_out, counted, arrived(frames)))
        self.counted_out += counted

    def engine_pushes(self, frames: Any) -> None:
        self.push.append((self.pushed_out, arrived(frames)))
        self.pushed_out += 1

    # ---- the beginning ----

    @initialize(serve=st.integers(0, 4), progress=st.integers(0, 2), requests=st.integers(0, 4))
    def begin(self, serve: int, progress: int, requests: int) -> None:
        self.dealer.append(arrived(self.engine.hello(1)))
        if serve:
            self.all_arrives()
            for number in range(progress):
                self.dealer.append(arrived(self.engine.progress(f"stage {number}", None)))
            self.dealer.append(arrived(self.engine.ready(INFO)))
            self.all_arrives()
            for _ in range(requests):
                self.add(malformed=False, count=1)
                self.call(malformed=False)
            self.all_arrives()

    @precondition(lambda self: self.alive and self.engine.state is EngineState.LOADING)
    @rule(ready=st.booleans())
    def load(self, ready: bool) -> None:
        frames = self.engine.ready(INFO) if ready else self.engine.progress("loading", 0.5)
        self.dealer.append(arrived(frames))

    @precondition(lambda self: self.dealer)
    @rule()
    def dealer_arrives(self) -> None:
        message = self.dealer.popleft()
        if self.client.state is ClientState.DEAD:
            with pytest.raises(ProtocolError):
                self.client.receive(message)
            return
        event = self.client.receive(message)
        if isinstance(event, client_side.HelloReceived):
            self.client_sends(self.client.init(output_address="ipc:///o", path="a:B", arguments={}), counted=False)

    # ---- the client's application ----

    @precondition(lambda self: self.client.state is ClientState.SERVING)
    @rule(malformed=st.sampled_from([False, False, False, True]), count=st.sampled_from([1, 1, 3]))
    def add(self, malformed: bool, count: int) -> None:
        # Requests that come together have one owner in the machine; here each handle is asked about on its own.
        waiter = Waiter(f"request {len(self.requests)}")
        handles, frames = self.client.add([[1, 2]] * count, None, SamplingParams(), NO_OPTIONS, waiter)
        assert len(handles) == count and not self.requests.keys() & set(handles)
        for handle in handles:
            self.requests[handle] = self.client.requests[handle] = Waiter(f"request {handle}")
        if malformed:
            frames[1] = bytes(frames[1])[:-1] + b"\xa1\x61x\x01"  # an unknown option
        self.client_sends(frames)

    @precondition(lambda self: self.client.state in UP)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        picks = data.draw(st.lists(st.sampled_from([0, 10**6, *self.requests]), max_size=4))
        live = {handle for handle, waiter in self.requests.items() if waiter.end is None and not waiter.aborted}
        frames = self.client.abort(picks)
        assert (frames is None) == (not live & set(picks))
        for handle in live & set(picks):
            self.requests[handle].aborted = True
        if frames is not None:
            self.client_sends(frames)

    @precondition(lambda self: self.client.state is ClientState.SERVING)
    @rule(malformed=st.sampled_from([False, False, False, True]))
    def call(self, malformed: bool) -> None:
        waiter = Waiter(f"call {len(self.calls)}")
        call_id, frames = self.client.call("method", [1], waiter)
        assert call_id not in self.calls
        self.calls[call_id] = waiter
        if malformed:
            frames[1] = bytes(frames[1])[:-1] + b"\xf7"  # undefined among the arguments
        self.client_sends(frames)

    @rule(pick=st.integers(0, 6))
    def forget_call(self, pick: int) -> None:
        self.client.forget_call(pick)
        if pick in self.calls and self.calls[pick].end is None:
            self.forgotten.add(pick)
            self.calls[pick].resolve("forgotten")

    @precondition(lambda self: self.client.state is ClientState.SERVING)
    @rule()
    def ping(self) -> None:
        self.client_sends(self.client.ping(), counted=False)

    @precondition(lambda self: self.client.state is ClientState.SERVING)
    @rule(mode=st.sampled_from(["abort", "drain"]), really=rarely)
    def shutdown(self, mode: Any, really: bool) -> None:
        if not really:
            return
        self.client_sends(self.client.shutdown(mode))

    # ---- the engine's side of the wire ----

    @precondition(lambda self: self.alive and self.to_engine)
    @rule(count=st.integers(1, 6))
    def arrives_at_engine(self, count: int) -> None:
        for _ in range(count):
            if not self.alive or not self.to_engine:
                return
            sent_before, counted, message = self.to_engine.popleft()
            lost = bytes(message[0]) == Ping.KIND and sent_before != self.counted_in
            try:
                event = self.engine.receive(message)
            except MessageLostError:
                assert lost, "nothing was lost"
                self.dies()
                return
            assert not lost, "a loss went unnoticed"
            self.counted_in += counted
            self.engine_handles(event)

    def engine_handles(self, event: Any) -> None:
        match event:
            case engine_side.RequestReceived(message):
                for handle in message.handles:
                    assert handle not in self.running
                    self.running.append(handle)
                    self.generated[handle] = []
            case engine_side.RequestMalformed(handles, problem):
                self.generated |= {handle: [] for handle in handles}
                self.engine_pushes(self.engine.fail(self.steps, handles, problem))
            case engine_side.AbortReceived(handles):
                self.release(list(handles))
            case engine_side.CallReceived(call_id, _, _):
                self.unanswered.append(call_id)
            case engine_side.CallMalformed(call_id, problem):
                self.engine_pushes(self.engine.answer(call_id, None, ("ProtocolError", problem, None)))
            case engine_side.PingReceived():
                self.engine_pushes(self.engine.pong(self.steps))
            case engine_side.ShutdownReceived("abort"):
                self.release(list(self.running))
            case _:
                assert event is None or isinstance(event, engine_side.InitReceived | engine_side.ShutdownReceived)

    def release(self, handles: list[int]) -> None:
        assert set(handles) <= set(self.running)
        self.running = [handle for handle in self.running if handle not in handles]
        if handles:
            self.engine_pushes(self.engine.release(self.steps, handles))

    # ---- the engine's application ----

    @precondition(lambda self: self.alive and self.engine.state in ANSWERING and self.running)
    @rule(count=st.integers(1, 4))
    def steps_of_one_token_each(self, count: int) -> None:
        for _ in range(count):
            self.step([(handle, [next(self.tokens)], None) for handle in self.running])

    @precondition(lambda self: self.alive and self.engine.state in ANSWERING and self.client.state in UP)
    @rule(data=st.data())
    def abort_between_two_steps(self, data: st.DataObject) -> None:
        self.all_arrives()
        if self.alive and self.running:
            self.steps_of_one_token_each(3)
            self.arrives_at_client(data.draw(st.integers(1, 2)))
        if self.client.state in UP:
            self.abort(data)

    @precondition(lambda self: self.alive and self.engine.state in ANSWERING)
    @rule(data=st.data())
    def some_step(self, data: st.DataObject) -> None:
        rows: list[Row] = []
        for handle in self.running[: data.draw(st.integers(0, 4))]:
            new = [next(self.tokens) for _ in range(data.draw(st.sampled_from([1, 1, 1, 0, 3])))]
            reason = data.draw(st.sampled_from([None, None, None, "stop", "error"]))
            rows.append((handle, new, None if reason is None else OutputDetails(finish_reason=reason)))
        self.step(rows)

    @precondition(lambda self: self.alive and self.engine.state in ANSWERING)
    @rule(data=st.data())
    def step_that_goes_on_about_what_has_ended(self, data: st.DataObject) -> None:
        """An adapter that does so is at fault, but nobody must notice."""
        ended = st.sampled_from([10**6, *sorted(set(self.generated) - self.engine.live)])
        handles = [*data.draw(st.sets(ended, max_size=2)), *self.running]
        last = data.draw(st.sampled_from([None, *handles]))
        details = OutputDetails(finish_reason="stop")
        self.step([(handle, [next(self.tokens)], details if handle == last else None) for handle in handles])
        self.step([(handle, [next(self.tokens)], None) for handle in handles])

    def step(self, rows: list[Row]) -> None:
        for handle, tokens, details in rows:
            if handle in self.running:
                self.generated[handle] += tokens
                if details is not None:
                    self.running.remove(handle)
        self.steps += 1
        self.engine_pushes(self.engine.outputs(self.steps, from_rows(rows)))

    @precondition(lambda self: self.alive and self.engine.state in ANSWERING and self.unanswered)
    @rule(pick=st.integers(0, 5), outcome=st.sampled_from(["value", "error", "unencodable"]))
    def answer(self, pick: int, outcome: str) -> None:
        call_id = self.unanswered.pop(pick % len(self.unanswered))
        if outcome == "value":
            self.engine_pushes(self.engine.answer(call_id, {"answer to": call_id}))
            return
        if outcome == "unencodable":
            with pytest.raises(UnencodableError):
                self.engine.answer(call_id, object())
        self.engine_pushes(self.engine.answer(call_id, None, ("Error", "boom", None)))

    @precondition(lambda self: self.alive and self.engine.state in ANSWERING)
    @rule(what=st.sampled_from(["stats", "answer to nobody", "unencodable outputs"]))
    def say_something_else(self, what: str) -> None:
        if what == "stats":
            self.engine_pushes(self.engine.stats({"running": len(self.running)}))
        elif what == "answer to nobody":
            self.engine_pushes(self.engine.answer(10**6, "nobody"))
        else:
            with pytest.raises(UnencodableError):
                self.engine.outputs(1, StepOutputs([1], [1], None, {0: OutputDetails(events=[object()])}))

    # ---- the client's side of the wire ----

    @precondition(lambda self: self.push)
    @rule(count=st.integers(1, 6))
    def arrives_at_client(self, count: int) -> None:
        for _ in range(min(count, len(self.push))):
            number, message = self.push.popleft()
            if self.client.state not in (*UP, ClientState.LOADING):
                with pytest.raises(ProtocolError):
                    self.client.receive(message)
                continue
            try:
                event = self.client.receive(message)
            except MessageLostError:
                assert number != self.pushed_in, "nothing was lost"
                # The client ends an engine whose outputs have a hole.
                self.dies()
                self.client_learns_of_death(read_first=True)
                return
            assert number == self.pushed_in, "a loss went unnoticed"
            self.pushed_in += 1
            self.client_handles(message, event)

    def client_handles(self, message: Message, event: Any) -> None:
        sent = decode_from_engine(message)
        if isinstance(sent, Tokens):
            sent = Outputs(sent.session, sent.sequence, sent.step, StepOutputs(self.last_handles, sent.token_ids))
        if isinstance(sent, Outputs):
            assert isinstance(event, client_side.StepReceived)
            self.last_handles = sent.outputs.handles
            self.step_arrives(sent, event)
        elif isinstance(sent, UtilityResult):
            waiter = self.calls.get(sent.call_id)
            if waiter is None or sent.call_id in self.forgotten:
                assert event is None
            else:
                assert isinstance(event, client_side.CallAnswered)
                assert event.owner is waiter
                assert event.error is not None or event.value == {"answer to": sent.call_id}
                waiter.resolve("answer")
        else:
            assert event is not None

    def step_arrives(self, sent: Outputs, event: client_side.StepReceived[Waiter]) -> None:
        expected: list[tuple[Waiter, list[int], str | None]] = []
        released: list[Waiter] = []
        for handle, tokens, more in sent.outputs.rows():
            waiter = self.requests.get(handle)
            reason = None if more is None else more.finish_reason
            if waiter is None or waiter.end is not None:
                continue
            if not waiter.aborted:
                expected.append((waiter, list(tokens), reason))
            elif reason is not None:
                released.append(waiter)
        rows = zip(event.owners, event.outputs.rows(), strict=True)
        got = [(owner, list(tokens), None if more is None else more.finish_reason) for owner, (_, tokens, more) in rows]
        assert got == expected
        assert [waiter for _, waiter in event.released] == released
        for waiter, tokens, reason in expected:
            waiter.take(tokens)
            if reason is not None:
                waiter.resolve(f"last row: {reason}")
        for waiter in released:
            waiter.resolve("release")

    # ---- what goes wrong ----

    @rule(kind=st.sampled_from(["outputs", "answer", "pong", "stats", "goodbye", "dead"]), number=st.integers(0, 3))
    def another_life_speaks(self, kind: str, number: int) -> None:
        session = SESSION - 1
        stale = {
            "outputs": lambda: Outputs(
                session,
                number,
                1,
                from_rows((h, [99], OutputDetails(finish_reason="stop")) for h in list(self.requests)[:3]),
            ),
            "answer": lambda: UtilityResult(session, number, number, None, "stale"),
            "pong": lambda: Pong(session, number, 99),
            "stats": lambda: Stats(session, number, {"running": 99}),
            "goodbye": lambda: Goodbye(session, number),
            "dead": lambda: Dead(session, number, "Error", "of another life", ""),
        }[kind]()
        assert self.client.receive(arrived(stale.encode())) is None

    @precondition(lambda self: self.alive and self.push)
    @rule(pick=st.integers(0, 20), really=rarely)
    def lose_a_message_to_the_client(self, pick: int, really: bool) -> None:
        if really:
            del self.push[pick % len(self.push)]

    @precondition(lambda self: self.alive and self.to_engine and self.engine.state in ANSWERING)
    @rule(pick=st.integers(0, 20), really=rarely)
    def lose_a_message_to_the_engine(self, pick: int, really: bool) -> None:
        if really:
            del self.to_engine[pick % len(self.to_engine)]

    @precondition(lambda self: self.alive)
    @rule(really=rarely, announce=st.booleans(), lost=st.integers(0, 5), learns=st.booleans(), read_first=st.booleans())
    def die(self, really: bool, announce: bool, lost: int, learns: bool, read_first: bool) -> None:
        if not really:
            return
        if announce and self.engine.state in (EngineState.LOADING, *ANSWERING):
            self.engine_pushes(self.engine.dead("Error", "boom", "Traceback"))
        for _ in range(min(lost, len(self.push))):
            self.push.pop()  # it never left the dead process
        self.dies()
        if learns:
            self.client_learns_of_death(read_first=read_first)

    def dies(self) -> None:
        self.alive = False
        self.to_engine.clear()
        self.running.clear()

    @precondition(lambda self: not self.alive and self.client.state is not ClientState.DEAD)
    @rule(read_first=st.booleans())
    def client_learns_of_death(self, read_first: bool) -> None:
        if read_first and self.client.state in UP:
            while self.push and self.push[0][0] == self.pushed_in:
                self.arrives_at_client(1)
        requests, aborting, calls = self.client.died()
        assert not any(waiter.aborted for waiter in requests)
        assert all(waiter.aborted for waiter in aborting)
        for waiter in (*requests, *aborting, *calls):
            waiter.resolve("death")
        assert self.client.died() == ([], [], [])

    # ---- what always holds ----

    @invariant()
    def the_tables_hold_what_is_open_and_nothing_else(self) -> None:
        if self.client.state is ClientState.DEAD:
            assert (self.client.requests, self.client.aborting, self.client.calls) == ({}, {}, {})
            return
        open_requests = {handle: waiter for handle, waiter in self.requests.items() if waiter.end is None}
        assert self.client.requests == {h: waiter for h, waiter in open_requests.items() if not waiter.aborted}
        assert self.client.aborting == {h: waiter for h, waiter in open_requests.items() if waiter.aborted}
        assert self.client.calls == {c: waiter for c, waiter in self.calls.items() if waiter.end is None}
        if self.alive:
            assert self.engine.live == set(self.running)

    @invariant()
    def everybody_has_the_tokens_of_the_engine_in_order_and_without_a_gap(self) -> None:
        for handle, waiter in self.requests.items():
            generated = self.generated.get(handle, [])
            assert waiter.tokens == generated[: len(waiter.tokens)]
            if waiter.end is not None and waiter.end.startswith("last row"):
                assert waiter.tokens == generated

    @rule()
    def all_arrives(self) -> None:
        while (
            self.dealer or (self.push and self.client.state is not ClientState.DEAD) or (self.to_engine and self.alive)
        ):
            while self.dealer:
                self.dealer_arrives()
            if self.to_engine and self.alive:
                self.arrives_at_engine(100)
            if self.push:
                self.arrives_at_client(100)

    def teardown(self) -> None:
        """Let everything end in good order, if it still can."""
        self.all_arrives()
        if self.alive and self.engine.state in ANSWERING and self.client.state in UP:
            if self.running:
                last = OutputDetails(finish_reason="length")
                rows = from_rows((handle, (), last) for handle in self.running)
                self.running = []
                self.engine_pushes(self.engine.outputs(self.steps, rows))
            for call_id in self.unanswered:
                self.engine_pushes(self.engine.answer(call_id, {"answer to": call_id}))
            self.engine_pushes(self.engine.stats({}))  # so that a loss just before it shows
            self.all_arrives()
            if self.client.state is ClientState.SERVING:
                self.ping()
                self.all_arrives()
        lost = self.counted_in != self.counted_out
        if self.alive and (lost or self.client.state not in UP):
            # A loss that no PING could show any more, or an engine that never got ready: a time limit ends it.
            assert self.client.state is not ClientState.SERVING
            self.dies()
        if not self.alive and self.client.state is not ClientState.DEAD:
            self.client_learns_of_death(read_first=True)
        assert (self.client.requests, self.client.aborting, self.client.calls) == ({}, {}, {})
        if self.alive:
            assert self.engine.live == set()
        for waiter in (*self.requests.values(), *self.calls.values()):
            assert waiter.end is not None, f"{waiter.name} waits for ever"
        self.everybody_has_the_tokens_of_the_engine_in_order_and_without_a_gap()


@pytest.mark.timeout(600)  # shrinking a failure takes longer than finding none
def test_any_order_of_calls_steps_deliveries_losses_and_deaths_keeps_the_promises() -> None:
    run_state_machine_as_test(Link, settings=settings(max_examples=150 * THOROUGHNESS, stateful_step_count=60))
