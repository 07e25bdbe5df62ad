"""ZeroMQ on AnyIO: no lost message and no missed wake-up, whatever is cancelled, on every backend."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
import zmq
from zmq.utils.garbage import gc as collector

from anyengine.transport.sockets import Socket, _CallbackReader

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {}), id="asyncio"),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
        pytest.param(("trio", {}), id="trio"),
    ],
)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    for peer in peers:
        peer.close(linger=0)
    peers.clear()
    context.destroy(linger=0)


peers: list[Any] = []


def pair(context: zmq.Context[Any], kind: int, other: int, name: str = "inproc://pair") -> tuple[Socket, Any]:
    ours, theirs = context.socket(kind), context.socket(other)
    for raw in (ours, theirs):
        raw.setsockopt(zmq.SNDHWM, 0)
        raw.setsockopt(zmq.RCVHWM, 0)
    ours.bind(name)
    theirs.connect(name)
    peers.append(theirs)
    return Socket(ours, routed=kind == zmq.ROUTER), theirs


async def receive(socket: Socket) -> list[bytes | memoryview]:
    while (frames := socket.receive_nowait()) is None:
        await socket.wait_readable()
    return frames


async def test_a_message_wakes_a_sleeping_reader(context: zmq.Context[Any]) -> None:
    socket, peer = pair(context, zmq.PULL, zmq.PUSH)
    got: list[Any] = []

    async def read() -> None:
        got.append(await receive(socket))

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            peer.send_multipart([b"kind", b"body"])
    assert got == [[b"kind", b"body"]]
    socket.close()


async def test_a_message_that_waits_does_not_make_the_reader_sleep(context: zmq.Context[Any]) -> None:
    socket, peer = pair(context, zmq.PULL, zmq.PUSH)
    peer.send_multipart([b"kind", b"body"])
    with anyio.fail_after(20):
        assert await socket.wait_readable() in (True, False)
        assert await socket.wait_readable() is False
    assert socket.receive_nowait() == [b"kind", b"body"]
    assert socket.receive_nowait() is None
    socket.close()


async def test_numbered_messages_all_arrive_under_random_cancellation(context: zmq.Context[Any]) -> None:
    """Deadlines fall in the same loop turns as messages; waiting never consumes, so none is lost."""
    socket, peer = pair(context, zmq.PULL, zmq.PUSH)
    count = 10_000
    chance = random.Random(7)

    def send() -> None:
        for number in range(count):
            peer.send_multipart([b"n", number.to_bytes(4, "little")])
            if number % 3 == 0:
                time.sleep(0.0002)  # so that the reader goes to sleep between bursts

    sender = threading.Thread(target=send, name="sender")
    sender.start()
    expected = cancelled = 0
    with anyio.fail_after(50):
        while expected < count:
            frames = None
            with anyio.move_on_after(chance.choice((0, 0.00001, 0.0001, 0.0003))) as scope:
                frames = await receive(socket)
            if frames is not None:
                assert frames == [b"n", expected.to_bytes(4, "little")]
                expected += 1
            cancelled += scope.cancelled_caught
    sender.join()
    assert cancelled > 10, "the test has to cancel waits to show anything"
    socket.close()


async def test_sending_and_receiving_on_one_router_never_stalls(context: zmq.Context[Any]) -> None:
    """A send takes away the edge that the sleeping reader waits for; the socket must wake it all the same."""
    router, peer = pair(context, zmq.ROUTER, zmq.DEALER, "inproc://router")
    rounds = 3_000

    def echo() -> None:
        for _ in range(rounds):
            peer.send_multipart(peer.recv_multipart())

    peer.send_multipart([b"hello", b""])
    received = 0

    async def read() -> None:
        nonlocal received
        while received < rounds:
            await receive(router)
            received += 1

    with anyio.fail_after(50):
        identity = (await receive(router))[0]
        echoing = threading.Thread(target=echo, name="echo")
        echoing.start()
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            for number in range(rounds):
                router.send([identity, b"n", number.to_bytes(4, "little")])
                if number % 7 == 0:
                    await anyio.sleep(0)
    echoing.join()
    router.close()


async def test_a_served_socket_is_read_whenever_something_comes(context: zmq.Context[Any]) -> None:
    """From another thread, while the reader is called again and again in portions, and while others read as well."""
    socket, peer = pair(context, zmq.PULL, zmq.PUSH)
    count = 5_000
    got: list[int] = []

    def drain() -> bool:
        for _ in range(7):
            if (frames := socket.receive_nowait()) is None:
                return False
            got.append(int.from_bytes(frames[1], "little"))
        return True

    def send() -> None:
        for number in range(count):
            peer.send_multipart([b"n", number.to_bytes(4, "little")])
            if number % 50 == 0:
                time.sleep(0.0005)

    sending = threading.Thread(target=send, name="send")
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(socket.serve, drain)
            sending.start()
            while len(got) < count:
                await anyio.sleep(0.001)
                if (frames := socket.receive_nowait()) is not None:
                    got.append(int.from_bytes(frames[1], "little"))
                    socket.wake()
            group.cancel_scope.cancel()
    sending.join()
    assert got == list(range(count))
    socket.close()


async def test_a_served_router_hears_what_comes_while_it_sends(context: zmq.Context[Any]) -> None:
    router, dealer = pair(context, zmq.ROUTER, zmq.DEALER)
    dealer.send_multipart([b"n", b"hello"])
    identity = (await receive(router))[0]
    answers: list[bytes] = []
    rounds = 2_000

    def drain() -> bool:
        while (frames := router.receive_nowait()) is not None:
            answers.append(bytes(frames[2]))
        return False

    def echo() -> None:
        for _ in range(rounds):
            dealer.send_multipart(dealer.recv_multipart())

    echoing = threading.Thread(target=echo, name="echo")
    echoing.start()
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(router.serve, drain)
            await anyio.wait_all_tasks_blocked()
            for number in range(rounds):
                router.send([identity, b"n", number.to_bytes(4, "little")])
                if number % 7 == 0:
                    await anyio.sleep(0)
            while len(answers) < rounds:
                await anyio.sleep(0.001)
            group.cancel_scope.cancel()
    echoing.join()
    assert answers == [number.to_bytes(4, "little") for number in range(rounds)]
    router.close()


async def test_an_error_in_the_reader_ends_the_serving(context: zmq.Context[Any]) -> None:
    socket, peer = pair(context, zmq.PULL, zmq.PUSH)

    def drain() -> bool:
        if socket.receive_nowait() is None:
            return False
        raise ValueError("no such message")

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:

            async def serve() -> None:
                with pytest.raises(ValueError, match="no such message"):
                    await socket.serve(drain)

            group.start_soon(serve)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(anyio.BusyResourceError):
                await socket.serve(drain)
            with pytest.raises(anyio.BusyResourceError):
                await socket.wait_readable()
            peer.send_multipart([b"kind", b"body"])
        # It is free again.
        assert socket.receive_nowait() is None
        peer.send_multipart([b"kind", b"body"])
        assert await receive(socket) == [b"kind", b"body"]
    socket.close()


async def test_closing_ends_the_serving_with_an_error(context: zmq.Context[Any]) -> None:
    socket, _ = pair(context, zmq.PULL, zmq.PUSH)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:

            async def serve() -> None:
                with pytest.raises(anyio.ClosedResourceError):
                    await socket.serve(lambda: socket.receive_nowait() is not None)

            group.start_soon(serve)
            await anyio.wait_all_tasks_blocked()
            socket.close()
    with pytest.raises(anyio.ClosedResourceError):
        await socket.serve(lambda: False)


async def test_closing_wakes_the_waiter_with_an_error(context: zmq.Context[Any]) -> None:
    socket, _ = pair(context, zmq.PULL, zmq.PUSH)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:

            async def wait() -> None:
                with pytest.raises(anyio.ClosedResourceError):
                    await socket.wait_readable()

            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            socket.close()
    with pytest.raises(anyio.ClosedResourceError):
        socket.receive_nowait()
    with pytest.raises(anyio.ClosedResourceError):
        socket.send([b"kind", b"body"])
    socket.close()  # a second time does nothing


async def test_a_second_waiter_is_refused_and_the_first_goes_on(context: zmq.Context[Any]) -> None:
    socket, peer = pair(context, zmq.PULL, zmq.PUSH)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(receive, socket)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(anyio.BusyResourceError):
                await socket.wait_readable()
            peer.send_multipart([b"kind", b"body"])
    socket.close()


async def test_a_router_answers_for_a_peer_that_it_does_not_know(context: zmq.Context[Any]) -> None:
    socket, _ = pair(context, zmq.ROUTER, zmq.DEALER)
    socket._raw.setsockopt(zmq.ROUTER_MANDATORY, 1)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(zmq.ZMQError, match="Host unreachable"):
        socket.send([b"\xff\xff", b"kind", b"body"])
    socket.close()


async def test_buffers_are_writable_views_and_large_frames_are_tracked(context: zmq.Context[Any]) -> None:
    socket, peer = pair(context, zmq.PAIR, zmq.PAIR)
    large = bytearray(range(256)) * 1024
    trackers = socket.send([b"k", b"body", large])
    assert len(trackers) == 1
    peer_frames = peer.recv_multipart()
    assert peer_frames[2] == large
    peer.send_multipart([b"k", b"body", large])
    frames = await receive(socket)
    buffer = frames[2]
    assert isinstance(buffer, memoryview)
    assert not buffer.readonly
    buffer[0] = 255
    assert bytes(buffer[1:]) == bytes(large[1:])
    with anyio.fail_after(20):
        while not trackers[0].done:
            await anyio.sleep(0.001)
    socket.close()
    collector.stop()  # pyzmq's thread outlives its users otherwise; Endpoints ends it, a Socket alone does not


async def test_a_hundred_idle_sockets_take_no_threads_and_no_second_descriptor(context: zmq.Context[Any]) -> None:
    before = set(threading.enumerate())
    sockets = [pair(context, zmq.PULL, zmq.PUSH, f"inproc://idle-{number}")[0] for number in range(100)]
    async with anyio.create_task_group() as group:
        for socket in sockets:
            group.start_soon(socket.wait_readable)
        await anyio.wait_all_tasks_blocked()
        assert set(threading.enumerate()) <= before  # one that idled since an earlier test may end
        group.cancel_scope.cancel()
    for socket in sockets:
        socket.close()


async def test_waking_has_what_drains_called_again_though_no_message_waits(context: zmq.Context[Any]) -> None:
    socket, _ = pair(context, zmq.PULL, zmq.PUSH)
    turns = 0

    def drain() -> bool:
        nonlocal turns
        turns += 1
        while socket.receive_nowait() is not None:
            pass
        return False

    async with anyio.create_task_group() as group:
        group.start_soon(socket.serve, drain)
        await anyio.wait_all_tasks_blocked()
        for _ in range(3):
            before = turns
            socket.wake()
            await anyio.wait_all_tasks_blocked()
            assert turns > before
        group.cancel_scope.cancel()
    socket.close()
    assert turns >= 3


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_reader_that_was_closed_leaves_alone_who_has_its_descriptor_next(anyio_backend: Any) -> None:
    descriptor, writer = os.pipe()
    reader = _CallbackReader(descriptor, lambda: False)
    reader.close()  # with the socket; the task that waited does it again when it has its turn
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, lambda: None)
    reader.close()
    assert loop.remove_reader(descriptor)
    os.close(descriptor)
    os.close(writer)
