"""Commands run without modules and functions that only Linux has.

No test here runs on Windows or macOS. The package's files see modules and names as on those
systems; third-party packages don't, since they handle those systems themselves.
"""

from __future__ import annotations

import json
import ntpath
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nanoengine.errors import ConfigError
from nanoengine.features.kv_tiers import DiskFiles
from nanoengine.jobs.manifest import changed_inputs, describe_inputs
from nanoengine.jobs.paths import relative
from nanoengine.jobs.record_log import RecordLog
from nanoengine.jobs.signals import Signals, Stopped
from nanoengine.jobs.source import find_inputs
from nanoengine.jobs.work import Work
from nanoengine.ranks.worker import Worker
from nanoengine.text import rendering

ROOT = Path(__file__).resolve().parent.parent

OTHER_SYSTEM = '''
import builtins, pathlib, types

MODULES = {"crypt", "fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog",
           "termios", "triton", "tty"}
NAMES = {
    "os": {"O_CLOEXEC", "O_DIRECTORY", "O_DSYNC", "O_NOFOLLOW", "O_NONBLOCK", "O_SYNC", "WNOHANG",
           "chown", "fchmod", "fchown", "fdatasync", "fork", "forkpty", "geteuid", "getgid",
           "getloadavg", "getpgid", "getuid", "killpg", "lchown", "memfd_create", "mkfifo", "nice",
           "pidfd_open", "posix_fadvise", "posix_fallocate", "posix_spawn", "pread", "preadv",
           "pwrite", "pwritev", "register_at_fork", "sched_getaffinity", "sched_setaffinity",
           "sched_yield", "sendfile", "setpgid", "setsid", "statvfs", "sysconf", "uname", "wait",
           "wait4"},
    "signal": {"ITIMER_REAL", "SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGSTOP",
               "SIGUSR1", "alarm", "pthread_kill", "pthread_sigmask", "setitimer", "sigwait"},
    "mmap": {"MADV_NOHUGEPAGE", "MAP_ANON", "MAP_ANONYMOUS", "MAP_PRIVATE", "MAP_SHARED",
             "PROT_READ", "PROT_WRITE"},
}
usual, exists = builtins.__import__, pathlib.Path.exists


class FilteredModule(types.ModuleType):
    """A module without the names that other systems lack."""

    def __init__(self, module):
        super().__init__(module.__name__)
        self.__dict__.update(
            {k: v for k, v in vars(module).items() if k not in NAMES[module.__name__]}
        )


def import_as_elsewhere(name, globals=None, locals=None, fromlist=(), level=0):
    if "/nanoengine/" not in str((globals or {}).get("__file__")):
        return usual(name, globals, locals, fromlist, level)
    if name.partition(".")[0] in MODULES:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    module = usual(name, globals, locals, fromlist, level)
    return FilteredModule(module) if name in NAMES else module


builtins.__import__ = import_as_elsewhere
pathlib.Path.exists = lambda path: not str(path).startswith(("/proc", "/dev")) and exists(path)
'''

COMMANDS = """
import io, sys
for missing in ("import fcntl", "from os import fork", "import mmap; mmap.MAP_PRIVATE"):
    try:
        exec(missing, {"__file__": "/nanoengine/x.py"})
    except (ImportError, AttributeError):
        continue
    sys.exit(f"{missing} is there")
from nanoengine.cli.main import main
greedy = ["--temperature", "0", "--max-tokens", "4", "--num-kv-blocks", "64"]
assert main(["generate", "demo", "--raw", "--prompt", "Long ago", *greedy]) == 0
sys.stdin = io.TextIOWrapper(io.BytesIO(b"Long ago\\n"))
assert main(["chat", "demo", *greedy]) == 0
batch = ["batch", "demo", "my rows.csv", "--output", "my answers.jsonl", "--errors", "errors.jsonl"]
batch += ["--template", "{{ text }}", "--sort-output", *greedy]
assert main(batch) == 1
assert main([*batch, "--retry-errors"]) == 1
assert main([*batch, "--restart"]) == 1
assert main(["batch", "demo", "my rows.csv", "--output", "x", "--replicas", "0"]) == 2
assert main(["info", "demo"]) == 0
"""

IMPORTS = """
import importlib, pkgutil
import nanoengine
optional = {"flash_attn", "lm_eval", "ray", "triton"}
for module in pkgutil.walk_packages(nanoengine.__path__, "nanoengine."):
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        if (error.__cause__ or error).name.partition(".")[0] not in optional:
            raise
"""
"""Imports every module, not only those that these commands use."""


def test_commands_run_and_files_load_without_linux_only_functions(tmp_path):
    directory = tmp_path / "my jobs"
    directory.mkdir()
    (tmp_path / "sitecustomize.py").write_text(OTHER_SYSTEM)  # template processes too
    (directory / "my rows.csv").write_text('text\nLong ago\n""\nTom\n')
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS + IMPORTS],
        cwd=directory, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = ", a little duck"
    assert done.stdout.count(answer) >= 1, done.stdout
    records = [json.loads(line) for line in (directory / "my answers.jsonl").open()]
    assert [record["_row"] for record in records] == [0, 2]
    assert records[0]["outputs"][0]["text"] == "There once was a"
    assert (directory / "my answers.1.jsonl").read_bytes()
    assert not list(directory.glob("*.lock"))


def test_the_grace_period_ends_without_sigalrm(monkeypatch):
    monkeypatch.setattr("nanoengine.jobs.signals.ALARM", None)
    work = Work((), lambda task, result: None)
    usual = signal.getsignal(signal.SIGINT)
    with Signals(0.05, work=work) as signals:  # noqa: SIM117
        with pytest.raises(Stopped) as ended:  # noqa: PT012
            signal.raise_signal(signal.SIGINT)
            assert work.is_stopping
            for _ in range(1000):
                time.sleep(0.01)
    assert ended.value.code == 128 + signal.SIGINT
    assert signals.signal_number == signal.SIGINT and signal.getsignal(signal.SIGINT) is usual


def test_a_template_times_out_without_sigalrm(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(OTHER_SYSTEM)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(rendering, "RENDER_S", 0.3)
    monkeypatch.setattr(rendering, "TIMED_OUT", 1)
    renderer = rendering.Renderer("row")
    with pytest.raises(TimeoutError):
        renderer.render("{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3, {})
    assert renderer.render("{{ x }}", {"x": 1}) == "1"
    renderer._stop()


def test_replicas_raise_where_processes_inherit_no_pipe(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ConfigError, match="Windows"):
        Worker("nanoengine.parallel.replica")


def test_a_log_may_be_moved_while_it_stays_locked(tmp_path):
    """As `--restart` does. Windows can't move an open file."""
    log = RecordLog(tmp_path / "out.jsonl")
    log.append(b'{"_row": 0}\n')
    with log.file_closed():
        (tmp_path / "out.jsonl").rename(tmp_path / "out.1.jsonl")
        with pytest.raises(ConfigError, match="by another process"):
            RecordLog(tmp_path / "out.jsonl")
    log.append(b'{"_row": 1}\n')
    log.sync()
    assert (tmp_path / "out.jsonl").read_bytes() == b'{"_row": 1}\n'
    log.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.1.jsonl", "out.jsonl"]
    RecordLog(tmp_path / "out.jsonl").close()


def test_another_thread_may_release_a_lock(tmp_path):
    log, disk = RecordLog(tmp_path / "out.jsonl"), DiskFiles(tmp_path, "model", [])
    for close in (log.close, disk.close):
        thread = threading.Thread(target=close)
        thread.start()
        thread.join()
    RecordLog(tmp_path / "out.jsonl").close()
    again = DiskFiles(tmp_path, "model", [])
    assert again.can_write
    again.close()


@pytest.mark.parametrize(
    ("path", "start", "found"),
    [
        (r"C:\jobs\my out\o.jsonl", r"C:\jobs\errors", "../my out/o.jsonl"),
        (r"c:\Jobs\o.jsonl", r"C:\jobs", "o.jsonl"),
        (r"D:\o.jsonl", r"C:\jobs", r"D:\o.jsonl"),
    ],
)
def test_a_manifest_names_the_output_from_any_drive(path, start, found):
    assert relative(path, start, ntpath) == found


@pytest.mark.parametrize("name", ["my data/in.jsonl", "C:/my data/in.jsonl"])
def test_a_manifest_names_inputs_the_same_with_either_slash(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(parents=True)
    backward = name.replace("/", "\\")
    for one in (name, backward):
        Path(one).write_text('{"prompt": "one"}\n')
    (described,) = describe_inputs(find_inputs([name]))
    assert described["name"] == name
    inputs = find_inputs([backward])
    monkeypatch.setattr(os, "sep", "\\")
    assert describe_inputs(inputs) == [described]
    assert not list(changed_inputs([described]))
