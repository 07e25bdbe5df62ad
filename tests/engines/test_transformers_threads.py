"""How many threads the transformers engine takes: by cores and quotas, beside others, and beside others' settings."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyengine.engine import EngineRequest
from anyengine.engines.transformers import TransformersEngine, cores, threads
from anyengine.engines.transformers.cores import FreeCores, cpu_quota, usable_cores
from anyengine.engines.transformers.thread_policy import WINDOW, ThreadPolicy, Window
from anyengine.engines.transformers.threads import SETTINGS, AdaptedThreads, SharedThreads, settle_threads
from anyengine.params import SamplingParams

pytestmark = pytest.mark.engines

CORES = len(os.sched_getaffinity(0))


# ---- cores and quotas ----

NONE = float("inf")
V1 = "31 23 0:29 {root} {point} rw,relatime shared:9 - cgroup cgroup rw,{controllers}"
V2 = "42 23 0:38 {root} {point} rw,relatime - cgroup2 cgroup2 rw"


@dataclasses.dataclass
class System:
    """A directory that looks like the root of a system with cgroups."""

    root: Path

    def mount(self, line: str, point: str, root: str = "/", controllers: str = "cpu,cpuacct") -> None:
        self._add("proc/self/mountinfo", line.format(root=root, point=point, controllers=controllers))

    def member(self, line: str) -> None:
        self._add("proc/self/cgroup", line)

    def set(self, file: str, text: str) -> None:
        self._add(file, text)

    def _add(self, file: str, text: str) -> None:
        path = self.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as stream:
            stream.write(text + "\n")


@pytest.fixture
def system(tmp_path: Path) -> System:
    system = System(tmp_path)
    system.mount("22 1 0:21 {root} {point} rw shared:1 - ext4 /dev/vda rw", "/")
    return system


class TestQuota:
    """On made-up systems, and in a real cgroup."""

    @pytest.mark.parametrize(
        ("text", "quota"),
        [("max 100000", NONE), ("250000 100000", 2.5), ("5000 10000", 0.5), ("", NONE), ("max", NONE)],
    )
    def test_of_version_2(self, system: System, text: str, quota: float) -> None:
        system.member("0::/")
        system.mount(V2, "/sys/fs/cgroup")
        system.set("sys/fs/cgroup/cpu.max", text)
        assert cpu_quota(system.root) == quota

    @pytest.mark.parametrize(("quota", "expected"), [("-1", NONE), ("150000", 1.5), ("0", NONE), ("nonsense", NONE)])
    @pytest.mark.parametrize("below", ["", "/worker"])
    def test_of_version_1(self, system: System, quota: str, expected: float, below: str) -> None:
        system.member(f"1:cpu,cpuacct:/docker/1f{below}")
        system.mount(V1, "/sys/fs/cgroup/cpu,cpuacct", root="/docker/1f")
        system.set(f"sys/fs/cgroup/cpu,cpuacct{below}/cpu.cfs_quota_us", quota)
        system.set(f"sys/fs/cgroup/cpu,cpuacct{below}/cpu.cfs_period_us", "100000")
        assert cpu_quota(system.root) == expected

    def test_the_least_of_all_cgroups_around_the_process_counts(self, system: System) -> None:
        system.member("0::/pod/app/worker")
        system.mount(V2, "/sys/fs/cgroup")
        system.set("sys/fs/cgroup/pod/cpu.max", "300000 100000")
        system.set("sys/fs/cgroup/pod/app/cpu.max", "max 100000")
        system.set("sys/fs/cgroup/pod/app/worker/cpu.max", "700000 100000")
        system.set("sys/fs/cgroup/neighbour/cpu.max", "100000 100000")
        assert cpu_quota(system.root) == 3.0

    def test_both_versions_beside_each_other(self, system: System) -> None:
        for line in ("9:name=systemd:/", "3:cpuset:/", "1:cpu:/a", "0::/b"):
            system.member(line)
        system.mount(V1, "/sys/fs/cgroup/cpuset", controllers="cpuset")
        system.mount(V1, "/sys/fs/cgroup/cpu", controllers="cpu")
        system.mount(V2, "/sys/fs/cgroup/unified")
        system.set("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "400000")
        system.set("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000")
        assert cpu_quota(system.root) == 4.0
        system.set("sys/fs/cgroup/unified/b/cpu.max", "200000 100000")
        assert cpu_quota(system.root) == 2.0

    @pytest.mark.parametrize("path", ["/../../pod/app", "/docker/1f"])
    def test_of_a_container_whose_path_only_the_host_can_see(self, system: System, path: str) -> None:
        system.member(f"0::{path}")
        system.mount(V2, r"/sys/fs/the\040cgroup")
        system.set("sys/fs/the cgroup/cpu.max", "200000 100000")
        assert cpu_quota(system.root) == 2.0

    def test_without_cgroups_or_proc(self, system: System, tmp_path: Path) -> None:
        assert cpu_quota(tmp_path / "nowhere") == NONE
        system.member("0::/")
        assert cpu_quota(system.root) == NONE

    @pytest.mark.parametrize("file", ["proc/self/cgroup", "proc/self/mountinfo"])
    def test_without_sense(self, system: System, file: str) -> None:
        system.member("0::/")
        system.set(file, "nonsense")
        assert cpu_quota(system.root) == NONE

    @pytest.mark.parametrize(
        ("allowed", "quota", "expected"), [(64, 2.9, 2), (64, 0.5, 1), (3, 8.0, 3), (5, NONE, 5), (1, NONE, 1)]
    )
    def test_usable_cores(self, monkeypatch: pytest.MonkeyPatch, allowed: int, quota: float, expected: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(allowed)))
        monkeypatch.setattr(cores, "cpu_quota", lambda root: quota)
        assert usable_cores() == expected

    def test_of_a_real_cgroup(self) -> None:
        with _cgroup_of_one_and_a_half_cores() as cgroup:
            code = (
                f"import os; open({str(cgroup / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
                "from anyengine.engines.transformers.cores import cpu_quota; print(cpu_quota())"
            )
            assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "1.5\n"


@contextlib.contextmanager
def _cgroup_of_one_and_a_half_cores() -> Iterator[Path]:
    for top in map(Path, ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup")):
        cgroup = top / f"anyengine-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            cgroup.mkdir()
            break
    else:
        pytest.skip("no cgroup can be made here; it takes root")
    try:
        files = {"cpu.cfs_quota_us": "150000", "cpu.max": "150000 100000"}
        found = [file for file in files if (cgroup / file).exists()]
        if not found:
            pytest.skip("cgroups have no CPU controller here")
        (cgroup / found[0]).write_text(files[found[0]])
        yield cgroup
    finally:
        cgroup.rmdir()


class TestFreeCores:
    """On made-up systems, and beside real processes."""

    def system(self, system: System, idle: dict[str, int]) -> System:
        """``idle`` is in ticks, half of it waiting for input or output."""
        (system.root / "proc/stat").unlink(missing_ok=True)
        lines = ["cpu  1 2 3 4 5 6 7 0 0 0"]
        lines += [f"{name} 9 9 9 {ticks // 2} {ticks - ticks // 2} 9 9 9 0 0" for name, ticks in idle.items()]
        system.set("proc/stat", "\n".join([*lines, "intr 17 0 0", "ctxt 5"]))
        return system

    def test_idle_cores_and_those_in_use_here(self, system: System, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 3})
        second = os.sysconf("SC_CLK_TCK")
        clock, cpu = iter([10.0, 14.0, 15.0]), iter([1.0, 5.0, 5.0])
        self.system(system, {"cpu0": 7, "cpu1": second, "cpu2": 5 * second, "cpu3": 0})
        free = FreeCores(system.root, lambda: next(clock), lambda: next(cpu))
        self.system(system, {"cpu0": 9 * second, "cpu1": 3 * second, "cpu2": 9 * second, "cpu3": 0})
        assert free.look() == pytest.approx((2 + 4 + 0 + 4) / 4)  # not core 0, which is not ours
        self.system(system, {"cpu0": 9 * second, "cpu1": 3 * second, "cpu2": 10 * second, "cpu3": 0})
        assert free.look() == pytest.approx(1.0)

    @pytest.mark.parametrize("idle", [{}, {"cpu0": 0, "cpu1": 0}, {"cpu0": 100}])
    def test_unknown(self, system: System, monkeypatch: pytest.MonkeyPatch, idle: dict[str, int]) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
        free = FreeCores(self.system(system, idle).root)
        assert free.look() is None
        (system.root / "proc/stat").unlink()
        assert free.look() is None

    def test_a_busy_process_is_seen(self) -> None:
        free = FreeCores()
        with _neighbours(CORES):
            time.sleep(0.3)
            busy = free.look()
        assert busy is not None
        assert busy < 0.5 * CORES  # this process sleeps, and others use all cores


# ---- the policy ----


@dataclasses.dataclass
class Machine:
    """Cores on which a process and its neighbours run, fairly: two of them share a core where there are too few."""

    cores: int
    neighbours: int = 0
    visible: bool = True

    def run(self, policy: ThreadPolicy, seconds: float) -> list[int]:
        """Make steps under a policy; the numbers of threads that it chose one after the other."""
        chosen = [policy.threads]
        for _ in range(round(seconds / WINDOW)):
            self.step(policy)
            if policy.threads != chosen[-1]:
                chosen.append(policy.threads)
        return chosen

    def step(self, policy: ThreadPolicy) -> None:
        running = policy.threads + self.neighbours
        excess = max(0, running - self.cores)
        lost = max(policy.threads * (1 - self.cores / max(running, self.cores)), min(excess, policy.threads) / 2)
        idle = max(0, self.cores - running)
        used = policy.threads - lost
        window = Window(WINDOW, used * WINDOW, round(200 * WINDOW) if lost else 0)
        policy.judge(window, lambda: idle + used if self.visible else None)
        assert 1 <= policy.threads <= self.cores


class TestPolicy:
    """On made-up machines."""

    @given(cores=st.integers(2, 96), lost=st.floats(0, 0.3), switches=st.integers(0, 10_000))
    def test_a_quiet_machine_has_all_threads(self, cores: int, lost: float, switches: int) -> None:
        policy = ThreadPolicy(cores)
        for _ in range(50):
            policy.judge(Window(0.25, (cores - lost) * 0.25, switches), lambda: 0.0)
            assert policy.threads == cores

    @given(cores=st.integers(2, 96), used=st.floats(1, 96))
    def test_threads_that_sleep_by_themselves_are_no_loss(self, cores: int, used: float) -> None:
        policy = ThreadPolicy(cores)
        for _ in range(50):
            policy.judge(Window(1.0, min(cores, used), 15), lambda: 0.0)
            assert policy.threads == cores

    @given(cores=st.integers(2, 96), neighbours=st.integers(1, 200))
    def test_beside_others_each_thread_gets_a_core_of_its_own(self, cores: int, neighbours: int) -> None:
        policy, machine = ThreadPolicy(cores), Machine(cores, neighbours)
        machine.run(policy, 12)
        assert policy.threads == max(1, cores - neighbours)
        assert len(machine.run(policy, 300)) == 1, "it tries again what cannot be"

    @given(st.integers(2, 96), st.integers(1, 200))
    def test_free_cores_are_taken_soon(self, cores: int, neighbours: int) -> None:
        policy, machine = ThreadPolicy(cores), Machine(cores, neighbours)
        machine.run(policy, 30)
        machine.neighbours //= 2
        machine.run(policy, 12)
        assert policy.threads == max(1, cores - machine.neighbours)
        machine.neighbours = 0
        machine.run(policy, 3)
        assert policy.threads == cores

    @pytest.mark.parametrize("cores", [2, 3, 8, 64])
    def test_where_free_cores_cannot_be_seen_they_are_tried_ever_more_seldom(self, cores: int) -> None:
        policy, machine = ThreadPolicy(cores), Machine(cores, neighbours=1, visible=False)
        machine.run(policy, 200)
        chosen = machine.run(policy, 600)
        assert max(chosen) == cores
        assert 5 < chosen.count(cores) < 12
        machine.neighbours = 0
        assert machine.run(policy, 70)[-1] == cores
        machine.run(policy, 10)
        machine.neighbours = 1  # the many failures count no longer
        machine.run(policy, 1)
        machine.neighbours = 0
        assert machine.run(policy, 2)[-1] == cores

    def test_neighbours_that_come_and_go_are_not_followed_each_time(self) -> None:
        policy, machine = ThreadPolicy(2), Machine(2)
        changes = 0
        for second in range(400):
            machine.neighbours = second % 4 // 2  # two seconds each
            changes += len(machine.run(policy, 1)) - 1
        assert changes < 40, "it follows all of a hundred"

    def test_a_dozen_engines_share_a_machine(self) -> None:
        policies = [ThreadPolicy(64) for _ in range(12)]
        for _ in range(100):
            for policy in policies:
                others = sum(other.threads for other in policies if other is not policy)
                Machine(64, others).step(policy)
        total = sum(policy.threads for policy in policies)
        assert 48 <= total <= 66
        assert min(policy.threads for policy in policies) >= 2

    @given(
        cores=st.integers(2, 16),
        visible=st.booleans(),
        spells=st.lists(st.tuples(st.integers(0, 20), st.floats(0, 20)), max_size=20),
    )
    def test_whatever_was_before_a_quiet_machine_gets_all_threads_again(
        self, cores: int, visible: bool, spells: list[tuple[int, float]]
    ) -> None:
        policy, machine = ThreadPolicy(cores), Machine(cores, visible=visible)
        for machine.neighbours, seconds in spells:
            machine.run(policy, seconds)
        machine.neighbours = 0
        machine.run(policy, 5 * 65)  # four times it doubles, each after 64 seconds at most
        assert policy.threads == cores


# ---- whose threads they are ----


@pytest.fixture
def torch_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch as in a new process: as many threads as there are cores, and nobody's settings."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(max(CORES, 2))
    yield
    torch.set_num_threads(before)


class TestWhoDecides:
    """The engine on its own four cores, or somebody else."""

    def settle(self, num_threads: int | None = None, *, on_cpu: bool = True, owns_process: bool = True) -> object:
        return settle_threads(num_threads, on_cpu=on_cpu, owns_process=owns_process)

    @pytest.fixture(autouse=True)
    def four_cores(self, torch_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(threads, "usable_cores", lambda: 4)
        torch.set_num_threads(8)

    def test_the_engine_in_a_process_of_its_own(self) -> None:
        assert isinstance(self.settle(), AdaptedThreads)
        assert torch.get_num_threads() == 4

    def test_one_core_needs_no_watching(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(threads, "usable_cores", lambda: 1)
        assert isinstance(self.settle(), contextlib.nullcontext)
        assert torch.get_num_threads() == 1

    @pytest.mark.parametrize("owns_process", [True, False])
    def test_an_argument(self, owns_process: bool) -> None:
        assert isinstance(self.settle(3, owns_process=owns_process), contextlib.nullcontext)
        assert torch.get_num_threads() == 3

    @pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_NUM_THREADS"])
    def test_a_setting_in_the_environment(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setenv(name, "6")
        assert isinstance(self.settle(), contextlib.nullcontext)
        assert torch.get_num_threads() == 8

    def test_a_model_on_another_device(self) -> None:
        assert isinstance(self.settle(on_cpu=False), contextlib.nullcontext)
        assert torch.get_num_threads() == 8

    def test_an_application_that_has_the_engine_in_its_process(self) -> None:
        assert isinstance(self.settle(owns_process=False), SharedThreads)
        assert torch.get_num_threads() == 8


class FakeSteps:
    """Figures of steps that a test makes up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = [0.0, 0.0, 0]
        monkeypatch.setattr(threads.WatchedSteps, "_now", lambda steps: tuple(self.now))

    def make(self, watch: threads.WatchedSteps, wall: float, cpu: float, switches: int) -> None:
        with watch:
            self.now = [self.now[0] + wall, self.now[1] + cpu, self.now[2] + switches]
        self.now = [self.now[0] + 100, self.now[1] + 50, self.now[2] + 999]  # between the steps


class TestWatching:
    """With made-up figures of steps."""

    def test_fewer_threads_beside_a_neighbour(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "anyengine")
        steps, number = FakeSteps(monkeypatch), [0]
        watch = AdaptedThreads(4, lambda: number[0], lambda n: number.__setitem__(0, n))
        assert number == [4]
        for _ in range(100):
            steps.make(watch, 0.05, 0.2, 0)
        assert (number, caplog.messages) == ([4], [])
        steps.make(watch, 0.15, 0.6, 0)
        steps.make(watch, 0.85, 2.6, 200)
        assert number == [3]
        assert caplog.messages == ["the engine computes with 3 threads in place of 4: other processes use the cores"]

    def test_a_failed_step_counts_and_its_error_goes_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        steps, number = FakeSteps(monkeypatch), [0]
        watch = AdaptedThreads(2, lambda: number[0], lambda n: number.__setitem__(0, n))
        with pytest.raises(ZeroDivisionError), watch:
            steps.now = [1.0, 1.2, 200]
            raise ZeroDivisionError
        assert number == [1]

    def test_a_number_that_somebody_else_has_set_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        steps, number = FakeSteps(monkeypatch), [0]
        watch = AdaptedThreads(4, lambda: number[0], lambda n: number.__setitem__(0, n))
        number[0] = 7
        for _ in range(10):
            steps.make(watch, 1.0, 1.0, 300)
        assert number == [7]

    def test_an_engine_that_shares_its_process_says_once_that_it_waits(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        steps, watch = FakeSteps(monkeypatch), SharedThreads(8)
        steps.make(watch, 1.0, 0.95, 100)
        steps.make(watch, 1.0, 0.4, 5)  # it waited for something else
        assert not caplog.messages
        for _ in range(3):
            steps.make(watch, 1.0, 0.5, 100)
        assert len(caplog.messages) == 1
        assert "torch's 8 threads" in caplog.messages[0]
        assert "num_threads=1" in caplog.messages[0]


# ---- real neighbours ----


@contextlib.contextmanager
def _neighbours(number: int) -> Iterator[None]:
    """Processes that use a core each."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.skipif(CORES == 1, reason="with one core there is one thread anyway")
@pytest.mark.usefixtures("torch_threads")
def test_beside_a_busy_process_the_engine_takes_fewer_threads_and_stays_fast(stand_in: Path) -> None:
    engine = TransformersEngine(model=str(stand_in), device="cpu", kv_cache_bytes=2**26)
    engine.owns_process = True
    engine.load(lambda stage, fraction=None: None)
    params = SamplingParams(max_tokens=2000, temperature=0.0, ignore_eos=True)
    engine.add_request(EngineRequest(handle=1, prompt_token_ids=[1], prompt_embeds=None, sampling=params))
    with _neighbours(CORES - 1):
        deadline = time.monotonic() + 30
        while engine.statistics()["threads"] == CORES:
            engine.step()
            assert time.monotonic() < deadline, "all threads still wait for each other"
        begin = time.monotonic()
        for _ in range(10):
            engine.step()
        assert time.monotonic() - begin < 5  # a step of this small model takes milliseconds
