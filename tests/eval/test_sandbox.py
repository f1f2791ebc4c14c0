from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from xsalab.eval import sandbox, sandbox_child, sandbox_run
from xsalab.eval.sandbox import Execution, Sandbox, run_once, self_test

RIGHT, CHECK = "def f(x):\n    return x + 1\n", "assert f(1) == 2\nassert f(5) == 6\n"


@pytest.fixture(scope="module")
def isolated() -> Sandbox:
    """The sandbox as it is opened without ``unsafe``. Skipped where the system lets no method start; a method that
    starts and does not protect is a failure, never skipped."""
    reasons = []
    for method in sandbox._methods()[:-1]:
        try:
            run_once(method, "", "", 20.0)
        except OSError as error:
            reasons.append(str(error))
    if len(reasons) == len(sandbox._methods()) - 1:
        pytest.skip(f"no isolation here: {'; '.join(reasons)}")
    return Sandbox.open()


@pytest.fixture(scope="module", params=["isolated", "none"])
def box(request: pytest.FixtureRequest) -> Sandbox:
    """With isolation, and without: what is judged right or wrong must not depend on it."""
    return request.getfixturevalue("isolated") if request.param == "isolated" else Sandbox("none", (), ())


@pytest.fixture
def fresh_survey() -> Iterator[None]:
    sandbox._survey.cache_clear()
    yield
    sandbox._survey.cache_clear()


@pytest.fixture
def mark() -> float:
    """A time limit that no other run has: it stands in the command line of every process of the run."""
    return 30 + time.time_ns() % 1_000_000 / 1e7


def alive(mark: float) -> list[int]:
    """Processes of the run with this time limit, as the whole system sees them."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if f'"seconds": {mark}'.encode() in words:
                found.append(int(folder.name))
    return found


def wait_until(holds: Callable[[], bool]) -> bool:
    """Generous: a busy machine is no failure."""
    for _ in range(500):
        if holds():
            return True
        time.sleep(0.02)
    return False


# Right and wrong


def test_a_right_program_passes_and_a_wrong_one_does_not(box: Sandbox) -> None:
    assert box.run(RIGHT, CHECK) == Execution(True, "passed", "")
    wrong = box.run("def f(x):\n    return 2\n", CHECK)
    assert (wrong.passed, wrong.outcome, wrong.detail) == (False, "wrong", "check, line 2: AssertionError")


@pytest.mark.parametrize(
    ("program", "outcome", "detail"),
    [
        ("def f(x:\n", "error", "SyntaxError"),
        ("import no_such_module", "error", "program, line 1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("\n\ndef f(x):\n    return x / 0\n", "error", "check, line 1: ZeroDivisionError: division by zero"),
        ("def f(x):\n    return f(x)\n", "error", "RecursionError"),
        ("def f(x):\n    assert False, 'own'\n", "wrong", "own"),
        ("", "error", "NameError"),
        ("x = '\udc80'", "error", "surrogates not allowed"),
        ("x = 0\0", "error", "null bytes"),
        ("class E(BaseException):\n    def __str__(self): raise SystemExit\nraise E", "error", "program, line 3: E"),
        ("import ctypes; ctypes.string_at(0)", "exited", f"signal {int(signal.SIGSEGV)}"),
    ],
)
def test_the_outcome_says_what_happened(program: str, outcome: str, detail: str) -> None:
    execution = run_once("none", program, CHECK, 20.0)[0]
    assert (execution.passed, execution.outcome) == (False, outcome)
    assert detail in execution.detail


EXITS = [
    "import sys; sys.exit(0)",
    "raise SystemExit",
    "quit()",
    "exit(0)",
    "import os; os._exit(0)",
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'pass'])",
    "import os\nif os.fork(): os._exit(0)",
    "import os, threading, time\nthreading.Thread(target=os._exit, args=(0,)).start()\ntime.sleep(60)",
    "import os\ndef f(x): os._exit(0)",
    "import sys\ndef f(x): sys.exit(0)",
]


@pytest.mark.parametrize("program", EXITS)
def test_a_program_that_ends_itself_has_not_passed(program: str) -> None:
    """F149: whatever the exit code, at top level or when it is called; its process ends before the token is asked."""
    execution = run_once("none", program, CHECK, 20.0)[0]
    assert (execution.passed, execution.outcome) == (False, "exited")


def test_a_program_that_ends_itself_has_not_passed_with_isolation_either(isolated: Sandbox) -> None:
    """F149."""
    with ThreadPoolExecutor(2) as pool:
        executions = list(pool.map(lambda program: isolated.run(program, CHECK, seconds=20.0), EXITS))
    assert [execution.outcome for execution in executions] == ["exited"] * len(EXITS)


SPRAY = """
import os
text = {words!r}
print(text, flush=True)
for file in range(3, 30):
    try:
        os.write(file, text.encode())
    except OSError:
        pass
"""


@pytest.mark.parametrize(
    "words",
    ["passed\n", '["loaded", ""]\n["done", ""]\n["passed", ""]\n', '["passed", ""]\n', "]" * 70_000, "[" * 60_000],
    ids=["passed", "whole-protocol", "verdict", "long", "deep"],
)  # fmt: skip
def test_nothing_that_a_program_writes_makes_it_pass(words: str) -> None:
    """F149: the harness's own words into every file descriptor, and then a hard exit with code 0."""
    execution = run_once("none", SPRAY.format(words=words) + "os._exit(0)\n", CHECK, 20.0)[0]
    assert not execution.passed


def test_a_program_that_prints_its_own_source_has_not_passed(box: Sandbox) -> None:
    """The text is a true quine of a wrong program: what it prints is checked to be its source."""
    text = sandbox.QUINE.format(sandbox.QUINE)
    execution = box.run(text, CHECK)
    assert (execution.passed, execution.outcome) == (False, "wrong")
    printed = execution.detail.split("\n", 1)[1]
    assert printed == text + "\npassed"


LOOK = """
import gc, os, sys
word = "".join(["need", "le"])  # a sum would be folded, and found here
seen, todo, frame = {id(word)}, gc.get_objects(), sys._getframe()
while frame:
    todo.append(frame.f_locals)
    frame = frame.f_back
while todo:
    thing = todo.pop()
    if id(thing) not in seen:
        seen.add(id(thing))
        assert not (isinstance(thing, (str, bytes)) and word in str(thing)), f"the check: {thing}"
        todo += gc.get_referents(thing)
pipes = 0
for file in range(3, 60):
    try:
        os.set_blocking(file, False)
        text = os.read(file, 9)
    except BlockingIOError:
        pipes += 1
    except OSError:
        continue
    else:
        raise AssertionError(f"{text} was there to read")
    os.set_blocking(file, True)
assert pipes == 1, pipes
def f(x):
    return x + 1
"""


def test_neither_check_nor_token_is_in_the_process_while_the_program_loads() -> None:
    """It walks all objects and frames and reads every pipe: the one that it finds is empty, until it was loaded."""
    assert run_once("none", LOOK, CHECK + "needle = 'needle'\n", 20.0)[0] == Execution(True, "passed", "")


ECHO = """
import os, threading
def echo(file):
    while True:
        text = os.read(file, 4096)
        for other in range(3, 30):
            try:
                os.write(other, text)
            except OSError:
                pass
for file in range(3, 30):
    threading.Thread(target=echo, args=(file,), daemon=True).start()
def f(x):
    import time
    time.sleep(0.2)
    os._exit(0)
"""


def test_a_thread_that_gives_back_all_that_comes_does_not_pass() -> None:
    """The token is not sent before the check has run to its end, so there is nothing to give back."""
    assert not run_once("none", ECHO, CHECK, 5.0)[0].passed


FORKED = """
import os, subprocess, sys
look = "import os\\nfor n in range(3, 60):\\n    try: os.fstat(n)\\n    except OSError: continue\\n    os._exit(9)"
child = os.fork()
if not child:
    exec(look)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert subprocess.run([sys.executable, "-S", "-c", look], close_fds=False).returncode == 0
"""


def test_children_of_a_program_do_not_get_the_pipes(box: Sandbox) -> None:
    assert box.run(FORKED, "", seconds=20.0) == Execution(True, "passed", "")


# What a program may rely on


USES = """
import dataclasses, json, math, os, pickle, re, sys, tempfile, typing
assert __name__ == "__main__" and sys.argv == ["program.py"] and sys.stdin.read() == ""
assert os.listdir() == []
with tempfile.NamedTemporaryFile("w", dir=".") as file:
    file.write("text")
with open("own.txt", "w") as file:
    file.write("ä")
assert open("own.txt", encoding="utf-8").read() == "ä"
@dataclasses.dataclass
class Point:
    x: int
def f(x: int) -> int:
    return x + 1
assert f.__annotations__["x"] is int, "our own __future__ import leaked"
assert pickle.loads(pickle.dumps(Point(1))) == Point(1)
assert "XSALAB_SECRET" not in os.environ and os.environ["HOME"] == os.getcwd()
"""


def test_a_program_runs_as_main_in_an_empty_folder_of_its_own(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also: the environment is not ours, standard input is empty, our compiler flags are not the program's."""
    monkeypatch.setenv("XSALAB_SECRET", "x")
    assert box.run(USES, CHECK, seconds=20.0) == Execution(True, "passed", "")


def test_installed_packages_can_be_imported_and_the_project_cannot(isolated: Sandbox) -> None:
    assert isolated.run("import numpy\ndef f(x):\n    return int(numpy.add(x, 1))", CHECK, seconds=20.0).passed
    project = isolated.run("import xsalab", "", seconds=20.0)
    assert "No module named 'xsalab'" in project.detail


def test_the_same_program_has_the_same_order_of_sets() -> None:
    """Hash seeds are fixed: a program that depends on the order of a set does not pass by luck."""
    first, second = (run_once("none", "print([*map(str, {*'abcdefgh'})])", "", 20.0)[0] for _ in range(2))
    assert first == second
    assert first.passed


def test_output_is_cut_and_the_rest_counted() -> None:
    flood = run_once("none", "print('x' * 999_999)\nimport sys; print('end', file=sys.stderr)", "", 20.0)[0]
    kept, told = flood.detail.split("\n")
    assert flood.passed
    assert kept == "x" * sandbox_run.OUTPUT
    assert told == f"... and {1_000_000 + 4 - sandbox_run.OUTPUT} bytes more"


def test_output_cannot_steer_a_terminal() -> None:
    detail = run_once("none", "print('\\x1b[2Ja\\rb\\u202e')\nraise ValueError('\\x1b[2J')", "", 20.0)[0].detail
    assert "\x1b" not in detail
    assert all(sign.isprintable() or sign == "\n" for sign in detail)
    assert "a\N{REPLACEMENT CHARACTER}b" in detail


# What a program cannot do

PEEK = """
import os
for path in PATHS:
    try:
        os.stat(path)
    except OSError:
        pass
    else:
        raise AssertionError(f"{path} is there")
for path in ("/new", "/etc/new", "/usr/lib/new", "/dev/new", os.__file__, OUTSIDE):
    try:
        open(path, "w").close()
    except OSError:
        pass
    else:
        raise AssertionError(f"{path} was written")
for path in ("/", "/usr/lib", os.path.dirname(os.__file__)):
    assert os.statvfs(path).f_flag & os.ST_RDONLY, f"{path} is not read-only, whoever owns it"
"""


def test_the_file_system_outside_is_out_of_reach(isolated: Sandbox, tmp_path: Path) -> None:
    """F150: reading and writing; the folder's contents, seen from here, are what they were."""
    canary = tmp_path / "canary"
    canary.write_text("x", encoding="utf-8")
    tmp_path.chmod(0o777)
    paths = [str(canary), "/etc/passwd", "/proc/self", "/sys", str(Path(__file__)), "/bin/sh", "/usr/bin", "/var"]
    program = f"PATHS = {paths!r}\nOUTSIDE = {str(tmp_path / 'new')!r}\n{PEEK}"
    assert isolated.run(program, "", seconds=20.0) == Execution(True, "passed", "")
    assert [path.name for path in tmp_path.iterdir()] == ["canary"]
    here = run_once("none", program, "", 20.0)[0]
    assert "is there" in here.detail  # the same program finds them where nothing protects


REACH = """
import socket
def refused(attempt):
    try:
        attempt()
    except OSError:
        return True
assert refused(lambda: socket.create_connection(("127.0.0.1", PORT), timeout=5))
assert refused(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", DATAGRAMS)))
assert refused(lambda: socket.socket(socket.AF_UNIX).connect("\\0" + NAME))
"""


def test_the_network_is_out_of_reach(isolated: Sandbox) -> None:
    """F150: TCP, UDP and abstract Unix sockets of this process; nothing arrives."""
    name = f"xsalab-test-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_UNIX) as local,
    ):
        datagrams.bind(("127.0.0.1", 0))
        local.bind(f"\0{name}")
        local.listen()
        ports = f"PORT, DATAGRAMS, NAME = {server.getsockname()[1]}, {datagrams.getsockname()[1]}, {name!r}\n"
        assert isolated.run(ports + REACH, "", seconds=20.0) == Execution(True, "passed", "")
        for listener in (server, datagrams, local):
            listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
        with pytest.raises(BlockingIOError):
            datagrams.recv(1)
        with pytest.raises(BlockingIOError):
            local.accept()


RISE = """
import ctypes, os
libc = ctypes.CDLL(None)
assert libc.unshare(0x10000000) != 0, "a new user namespace, where it would be root"
assert libc.mount(b"none", b"/sandbox", b"tmpfs", ctypes.c_ulong(0), None) != 0
assert libc.umount2(b"/sandbox", 2) != 0
assert libc.chroot(b"/sandbox") != 0 and libc.setuid(0) != 0 and libc.sethostname(b"x", 1) != 0
assert os.getuid() != 0 and os.getpid() < 9
import resource
for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):
    try:
        resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (ValueError, OSError):
        continue
    raise AssertionError("a limit was lifted")
"""


def test_a_program_cannot_win_rights_back(isolated: Sandbox) -> None:
    if isolated.method == "bubblewrap":
        pytest.skip("bubblewrap leaves nested user namespaces to the system")
    assert isolated.run(RISE, "", seconds=20.0) == Execution(True, "passed", "")


# Every process forks on: 2^7 of them were there, should nothing bind; those that are there stay for the whole limit.
BOMB = """
import os, time
for _ in range(7):
    try:
        os.fork()
    except OSError:
        break
time.sleep(20)
"""


def test_a_fork_bomb_is_bounded_and_leaves_nothing(isolated: Sandbox, mark: float) -> None:
    """Counted from outside, while it is there and after; as root too, whom the system's own limit does not bind."""
    counts: list[int] = []
    runner = threading.Thread(target=lambda: isolated.run(BOMB, "", seconds=mark))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox_run, "_next", _shortened(sandbox_run._next))
        runner.start()
        while runner.is_alive():
            counts.append(len(alive(mark)))
            time.sleep(0.05)
    assert sandbox_run.PROCESSES - 3 <= max(counts) <= sandbox_run.PROCESSES + 3
    assert wait_until(lambda: not alive(mark))


def _shortened(real: Callable[..., tuple[str, str]]) -> Callable[..., tuple[str, str]]:
    """The limit of a run is its mark; it is waited for 1 s alone."""
    return lambda words, seconds, late: real(words, seconds if seconds == sandbox_run.START else 1.0, late)


DETACH = """
import os, time
if not os.fork():
    os.setsid()
    if not os.fork():
        for file in range(30):
            try:
                os.close(file)
            except OSError:
                pass
        time.sleep(60)
    os._exit(0)
time.sleep(0.2)
def f(x):
    return x + 1
"""


def test_a_process_that_hides_is_ended_as_well(isolated: Sandbox, mark: float) -> None:
    """Session, group, parent and pipes left behind: it goes with its namespace, though the run itself passed."""
    assert isolated.run(DETACH, CHECK, seconds=mark).passed
    assert wait_until(lambda: not alive(mark))


def test_memory_is_limited(box: Sandbox) -> None:
    """It takes 8 MiB at a time, up to 1 GiB, and tells how much it was given."""
    hog = "held = []\nfor n in range(128):\n    print(8 * n, flush=True)\n    held.append(b'x' * (8 << 20))\n"
    execution = box.run(hog, "", seconds=20.0)
    assert (execution.passed, execution.outcome) == (False, "error")
    assert "MemoryError" in execution.detail
    given = int(execution.detail.split()[-1])
    assert 128 <= given <= sandbox_run.MEMORY >> 20


FILL = """
total = 0
try:
    for number in range(NUMBER):
        with open(f"file{number}", "wb", buffering=0) as file:
            for _ in range(64):
                total += file.write(bytes(1 << 20))
except OSError as error:
    print(total, type(error).__name__)
"""


def test_a_file_and_the_folder_are_limited(isolated: Sandbox) -> None:
    one = isolated.run("NUMBER = 1" + FILL, "", seconds=20.0)
    assert one.detail == f"{sandbox_run.FILE_SIZE} OSError"
    several = FILL.replace("        with", "      try:\n       with").replace("            for", "        for")
    several = several.replace("                total", "            total").replace(
        "except OSError as error", "      except OSError:\n        pass\nexcept OSError as error"
    )
    program = "NUMBER = 4" + several + "import os\nprint(sum(os.stat(name).st_size for name in os.listdir()))\n"
    assert 0 < int(isolated.run(program, "", seconds=20.0).detail) <= sandbox_run.FOLDER_SIZE


LOOPS = [
    "while True:\n    pass\n",
    "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass\n",
    "import signal\nfor n in range(1, 32):\n    try:\n        signal.signal(n, signal.SIG_IGN)\n    except OSError:\n"
    "        pass\nwhile True:\n    pass\n",
    "sum(range(10**15))",
    "import time\ntime.sleep(60)\n",
    "def f(x):\n    while True:\n        pass\n",
]


@pytest.mark.parametrize("program", LOOPS, ids=["loop", "catch-all", "signals", "in-c", "sleep", "in-check"])
def test_what_does_not_end_is_ended_from_any_thread(program: str) -> None:
    """F153: 0.3 s, asked for in a worker thread, without any isolation; no alarm is set in this process."""
    with ThreadPoolExecutor(1) as pool:
        begun = time.monotonic()
        execution, gone = pool.submit(run_once, "none", program, CHECK, 0.3).result()
    assert execution == Execution(False, "timeout", "not done after 0.3 s")
    assert gone
    assert 0.3 <= time.monotonic() - begun < 20  # the loops have no end; starting an interpreter takes its time
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_what_does_not_end_is_ended_with_isolation(isolated: Sandbox) -> None:
    """F153."""
    with ThreadPoolExecutor(2) as pool:
        executions = list(pool.map(lambda program: isolated.run(program, CHECK, seconds=0.3), LOOPS))
    assert [execution.outcome for execution in executions] == ["timeout"] * len(LOOPS)


def test_a_program_does_not_outlive_whoever_runs_it(box: Sandbox, mark: float, tmp_path: Path) -> None:
    """The process that asked is killed hard; within moments the program and its helpers are gone."""
    folder = str(Path(sandbox_run.__file__).parent)
    code = (  # the files alone: all of xsalab takes seconds to import
        f"import sys, types\nbare = sys.modules['bare'] = types.ModuleType('bare')\nbare.__path__ = [{folder!r}]\n"
        f"from bare.sandbox_run import run_once\nrun_once({box.method!r}, 'while 1: pass', '', {mark})\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)}) as asking:
        assert wait_until(lambda: len(alive(mark)) >= 2)
        asking.kill()
    assert wait_until(lambda: not alive(mark))


def test_eight_at_a_time(isolated: Sandbox) -> None:
    """Each has its own folder, its own output and its own verdict."""

    def one(number: int) -> Execution:
        program = (
            f"import os, time\nopen('own', 'w').write('{number}')\ntime.sleep(0.1)\n"
            f"print(os.listdir(), open('own').read())\ndef f(x):\n    return x + {number % 2}\n"
        )
        return isolated.run(program, CHECK, seconds=30.0)

    with ThreadPoolExecutor(8) as pool:
        executions = list(pool.map(one, range(8)))
    assert [execution.passed for execution in executions] == [False, True] * 4
    assert [execution.detail.split("\n")[-1] for execution in executions] == [f"['own'] {n}" for n in range(8)]


def test_a_time_limit_is_a_positive_number() -> None:
    for seconds in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="time limit"):
            run_once("none", "", "", seconds)


# Opening


def test_without_isolation_it_says_what_is_not_protected(monkeypatch: pytest.MonkeyPatch, fresh_survey: None) -> None:
    """F150: nothing is run unless the user takes the risk; then right and wrong are still told apart."""
    monkeypatch.setattr(sandbox, "_methods", lambda: ["none"])
    with pytest.raises(ValueError, match=r"Not protected: file system, network, processes\..*--unsafe-run-code"):
        Sandbox.open()
    unsafe = Sandbox.open(unsafe=True)
    assert unsafe == Sandbox("none", ("memory", "file size"), ("file system", "network", "processes"))
    assert unsafe.run(RIGHT, CHECK).passed


def test_the_strongest_method_is_taken_and_tested_once(
    isolated: Sandbox, monkeypatch: pytest.MonkeyPatch, fresh_survey: None
) -> None:
    tested: list[str] = []
    monkeypatch.setattr(sandbox, "self_test", lambda method: tested.append(method) or {})
    assert Sandbox.open() == Sandbox.open(unsafe=True) == isolated
    assert tested == [isolated.method]
    assert isolated.missing == ()


def test_the_self_test_notices_what_does_not_hold(monkeypatch: pytest.MonkeyPatch, fresh_survey: None) -> None:
    """A harness that passes everything is no judge: refused by name even where the risk is taken."""
    passes = Execution(True, "passed", "")
    monkeypatch.setattr(sandbox, "run_once", lambda *_, **__: (passes, False))
    failed = self_test("none")
    assert failed["processes"] == "a process was left"
    assert {name for name, _, outcome in sandbox.JUDGED if outcome != "passed"} <= set(failed)
    with pytest.raises(ValueError, match="a wrong program fails: no, passed"):
        Sandbox.open(unsafe=True)


STAND_IN = """#!{python}
import json, os, sys
words = sys.argv[1:]
if {refuses}:
    sys.exit("bwrap: No permissions to create new namespace")
open({log!r}, "w").write(json.dumps(words))
bound = {{words[n + 2]: words[n + 1] for n, word in enumerate(words) if word == "--ro-bind"}}
command = words[words.index("--") + 1 :]
os.execv(command[0], [bound.get(word, word) if word == "/runner.py" else word for word in command])
"""


@pytest.fixture
def bwrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], Path]:
    """A stand-in on the path that writes its command line down and protects nothing, or refuses to work."""

    def install(refuses: bool) -> Path:
        log, script = tmp_path / "words.json", tmp_path / "bin" / "bwrap"
        script.parent.mkdir()
        script.write_text(STAND_IN.format(python=sys.executable, refuses=refuses, log=str(log)), encoding="utf-8")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)
        return log

    return install


def test_bubblewrap_is_asked_for_all_that_is_promised(bwrap: Callable[[bool], Path]) -> None:
    log = bwrap(False)
    assert run_once("bubblewrap", RIGHT, CHECK, 20.0)[0] == Execution(True, "passed", "")
    words = json.loads(log.read_text(encoding="utf-8"))
    options = words[: words.index("--")]
    assert {"--unshare-all", "--unshare-user", "--die-with-parent"} <= set(options)
    assert options[options.index("--cap-drop") + 1] == "ALL"
    assert "--share-net" not in options
    assert [options[n + 1] for n, word in enumerate(options) if word in ("--bind", "--dev-bind")] == ["/dev/null"]
    bound = [options[n + 1] for n, word in enumerate(options) if word == "--ro-bind"]
    own = Path(sandbox_child.__file__)
    assert str(own) in bound
    assert not [path for path in bound if path != str(own) and own.is_relative_to(path)]
    assert not [path for path in bound if Path.home().is_relative_to(path) or Path("/etc/passwd").is_relative_to(path)]
    assert options[options.index("--tmpfs") + 1] == "/sandbox"
    assert options[options.index("--tmpfs") - 2 :][:2] == ["--size", str(sandbox_run.FOLDER_SIZE)]


def test_a_method_that_does_not_work_here_is_told_with_its_reason(
    bwrap: Callable[[bool], Path], monkeypatch: pytest.MonkeyPatch, fresh_survey: None
) -> None:
    """And a run that could not start is no verdict about a program: OSError."""
    bwrap(True)
    monkeypatch.setattr(sandbox, "_methods", lambda: ["bubblewrap", "none"])
    with pytest.raises(ValueError, match="bwrap: No permissions to create new namespace"):
        Sandbox.open()
    with pytest.raises(OSError, match="did not start"):
        Sandbox("bubblewrap", (), ()).run(RIGHT, CHECK)


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_the_real_bubblewrap_holds() -> None:
    """As root it cannot bind the number of processes, and that is found."""
    try:
        failed = self_test("bubblewrap")
    except OSError as error:
        pytest.skip(str(error))
    assert set(failed) <= ({"processes"} if os.geteuid() == 0 else set())


@pytest.mark.slow
def test_humaneval_s_own_solutions_pass_and_stubs_fail(isolated: Sandbox, shared_data: Path) -> None:
    """Every eighth problem, run as the benchmark joins program and test; all 164 pass (measured once)."""
    lines = (shared_data / "chat" / "humaneval_test.jsonl").read_text(encoding="utf-8").splitlines()
    items = [json.loads(line) for line in lines][::8]

    def run(item: dict[str, str], body: str) -> bool:
        check = f"{item['test']}\ncheck({item['entry_point']})\n"
        return isolated.run(item["prompt"] + body, check, seconds=30.0).passed

    with ThreadPoolExecutor(2) as pool:
        right = list(pool.map(lambda item: run(item, item["canonical_solution"]), items))
        wrong = list(pool.map(lambda item: run(item, "    return None\n"), items))
    assert len(items) == 21
    assert all(right)
    assert not any(wrong)
