"""The other side of ``sandbox.py``: a file of its own that a bare interpreter runs; the standard library alone.

    namespaces    outer process ── pid 1 of the new namespace ── the program
    bubblewrap    bwrap ── pid 1 ── warden ── the program
    none          warden ── the program

Whoever stands directly above the program (the warden, or pid 1) waits for it and tells how it ended. The program's
process talks to the harness over two pipes, a JSON value a line: it says "ready", is given the program, says "loaded",
is given the check, says "done", is given the token and sends it back. Nothing is sent before it is asked for: while
the program loads, neither check nor token is in this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import sys
import traceback
import types
from typing import Any, NoReturn

CLONE_FLAGS = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000  # USER NS PID NET IPC UTS
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 1 << 12, 1 << 14, 1 << 18
MNT_DETACH, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 2, -100, 0x8000, 1, 2
SYS_MOUNT_SETATTR = 442  # the same number on every architecture but alpha
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, SIGKILL = 1, 38, 9
CAPABILITY_VERSION_3 = 0x20080522
INSIDE, NOBODY = 1000, 65534  # the program's user inside; the outer user that it is where we are root
TEXT = 1000  # characters of a message


def main() -> None:
    config: dict[str, Any] = json.loads(sys.argv[1])
    answers, questions = os.dup(1), os.dup(0)  # copies that no exec inherits
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    try:
        if config["method"] == "namespaces":
            enter_namespaces(config)
    except (OSError, AttributeError) as error:  # AttributeError: a C library without the call
        tell(answers, "cannot", str(error))
        os._exit(1)
    die_with_parent()
    if hasattr(os, "fork"):
        program = os.fork()
        if program:
            os.close(questions)
            wait_for(program, answers)
        die_with_parent()
        os.register_at_fork(after_in_child=lambda: (os.close(questions), os.close(answers)))
    set_limits(config)
    serve(questions, answers, config)


def tell(answers: int, kind: str, text: str = "") -> None:
    os.write(answers, json.dumps([kind, text[:TEXT]]).encode() + b"\n")


def wait_for(program: int, answers: int) -> NoReturn:
    """Reaps whatever ends, orphans too, until the program's process has; then all that is left goes with pid 1."""
    pid = status = 0
    while pid != program:
        pid, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    with contextlib.suppress(BrokenPipeError):  # the harness has what it wants
        tell(answers, "exited", f"the process {how} before the tests were done")
    os._exit(0)


def serve(questions: int, answers: int, config: dict[str, Any]) -> NoReturn:
    """Loads the program, then the check in the same namespace; the token is asked for when both are done."""
    # Own references: what a program does to modules and builtins does not reach these.
    read, write, decode, leave = os.fdopen(questions, "rb").readline, os.write, json.loads, os._exit
    run, translate, wrong, message = exec, compile, AssertionError, failure
    sys.path += config["packages"]
    sys.argv = ["program.py"]
    import site

    site.setquit()  # exit() and quit(), which -S leaves out
    module = types.ModuleType("__main__")
    sys.modules["__main__"], names = module, module.__dict__
    tell(answers, "ready")
    for stage, done in (("program", b'["loaded", ""]\n'), ("check", b'["done", ""]\n')):
        try:
            run(translate(decode(read()), f"<{stage}>", "exec", dont_inherit=True), names)
        except BaseException as error:
            write(answers, message(stage, error, wrong))
            leave(1)
        write(answers, done)
    write(answers, read())
    leave(0)


def failure(stage: str, error: BaseException, wrong: type[BaseException]) -> bytes:
    """The line that tells of an exception; an exception that cannot be shown is told of all the same."""
    kind = "exited" if isinstance(error, SystemExit) else "error"
    if stage == "check" and isinstance(error, wrong):
        kind = "wrong"
    walk = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in walk if frame.f_code.co_filename == f"<{stage}>"]
    error.__traceback__ = None  # lets go of what a program without memory left holds
    text = type(error).__name__
    with contextlib.suppress(BaseException):  # __str__ is the program's own code
        text = "".join(traceback.format_exception_only(error)).strip()
    place = f"{stage}, line {lines[-1]}" if lines else stage
    return json.dumps([kind, f"{place}: {text}"[:TEXT]]).encode() + b"\n"


def set_limits(config: dict[str, Any]) -> None:
    """Limits of the program's process and of all that it starts. What does not bind, the self-test finds."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return
    wanted = {
        "RLIMIT_AS": config["memory"],
        "RLIMIT_FSIZE": config["file_size"],
        "RLIMIT_CPU": math.ceil(config["seconds"]) + 1,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
    }
    if config["method"] != "none":  # without a user namespace the limit would count the user's other processes
        wanted["RLIMIT_NPROC"] = config["processes"]
    for name, value in wanted.items():
        kind = getattr(resource, name, None)
        if kind is not None:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            with contextlib.suppress(ValueError, OSError):  # macOS refuses RLIMIT_AS
                resource.setrlimit(kind, (value, value))


def enter_namespaces(config: dict[str, Any]) -> None:
    """Returns in pid 1 of new namespaces, as an unprivileged user, with a root of the interpreter's folders alone.

    Raises OSError that names the call that was refused.
    """
    real = {path: os.path.realpath(path) for path in config["paths"]}
    unshare_as_user()
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for folder in ("/tmp/old", "/tmp/new", "/tmp/new/dev", "/tmp/new/sandbox"):
        os.mkdir(folder)
    call("pivot_root", b"/tmp", b"/tmp/old")
    os.chdir("/")
    for path, source in {**real, "/dev/null": "/dev/null"}.items():
        if os.path.isdir(f"/old{source}"):
            os.makedirs(f"/new{path}", exist_ok=True)
        else:
            os.makedirs(os.path.dirname(f"/new{path}"), exist_ok=True)
            os.close(os.open(f"/new{path}", os.O_CREAT | os.O_WRONLY))
        mount(f"/old{source}", f"/new{path}", None, MS_BIND | MS_REC)
    call("umount2", b"/old", MNT_DETACH)
    read_only = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID)
    call("syscall", ctypes.c_long(SYS_MOUNT_SETATTR), AT_FDCWD, b"/", AT_RECURSIVE, read_only, ctypes.c_size_t(32))
    options = f"size={config['folder_size']},nr_inodes=1024,mode=700,uid={INSIDE},gid={INSIDE}"
    mount("tmpfs", "/new/sandbox", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
    # The old root is gone already. A process in a chroot may make no user namespace: no way back to capabilities.
    os.chroot("/new")
    os.chdir("/sandbox")
    first = os.fork()
    if first:
        die_with_parent()
        os.waitpid(first, 0)
        os._exit(0)
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(INSIDE, INSIDE, INSIDE)
        os.setresuid(INSIDE, INSIDE, INSIDE)
    call("capset", (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)())
    call("prctl", PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0)))


def unshare_as_user() -> None:
    """New namespaces; a helper that stays outside says who we are inside, as only somebody outside may.

    Root stays root inside for the mounts and has ``NOBODY`` beside it for the program: no limit on processes binds
    root. Everybody else is ``INSIDE`` from the start.
    """
    user, group, process = os.geteuid(), os.getegid(), os.getpid()
    several = user == 0 and maps_nobody()
    ready, go = os.pipe()
    helper = os.fork()
    if not helper:
        os.close(go)
        status = 1
        with contextlib.suppress(OSError):
            os.read(ready, 1)
            if not several:
                write_file(f"/proc/{process}/setgroups", "deny")
            for name, own in (("uid_map", user), ("gid_map", group)):
                entries = f"0 {own} 1\n{INSIDE} {NOBODY} 1" if several else f"{INSIDE} {own} 1"
                write_file(f"/proc/{process}/{name}", entries)
            status = 0
        os._exit(status)
    try:
        call("unshare", CLONE_FLAGS)
    finally:
        os.close(go)
        os.close(ready)
        mapped = os.waitpid(helper, 0)[1] == 0
    if not mapped:
        raise OSError("user namespace: the system does not let users be mapped")


def maps_nobody() -> bool:
    """Whether this user namespace knows NOBODY: inside some containers root is the only user."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        spans = [tuple(map(int, line.split())) for line in file]
    return any(first <= NOBODY < first + count for first, _, count in spans)


def write_file(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY)
    os.write(file, text.encode())  # one write: the kernel takes a map whole or not at all
    os.close(file)


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    call("mount", *encoded[:3], ctypes.c_ulong(flags), encoded[3], what=f"mount {target}")


def call(name: str, *arguments: Any, what: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what or name}: {os.strerror(number)}")


def die_with_parent() -> None:
    if sys.platform == "linux":
        call("prctl", PR_SET_PDEATHSIG, *map(ctypes.c_ulong, (SIGKILL, 0, 0, 0)))


if __name__ == "__main__":
    main()
