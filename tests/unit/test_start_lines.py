"""What a framework writes about itself is held back; all else, and every failure, is shown.

Each case runs in a process of its own: it is about file descriptor 2 as the process has it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from sparkdl.process.start_lines_filter import DROP, SHOW, Filter, known

ABSL = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"
INFO = "I0000 00:00:1795711012.484886   27099 port.cc:153] oneDNN custom operations are on."
OLD = "2026-11-26 10:00:00.123456: I tensorflow/core/util/port.cc:153] oneDNN custom operations"
FEATURES = (
    "To enable the following instructions: AVX2, in other operations, rebuild TensorFlow with"
)
CUINIT = "E0000 00:00:1795711052.23   27099 cuda_platform.cc:52] failed call to cuInit: INTERNAL"
WARNED = "W0000 00:00:1795711052.23   27099 gpu_device.cc:2433] Cannot dlopen some GPU libraries."
pytestmark = pytest.mark.processes
NOISE = [ABSL, INFO, OLD, FEATURES]

START = """
import os, subprocess, sys, threading, time
from sparkdl.process.start_lines import start_lines_held
def say(text):
    os.write(2, text.encode())
def noise():
    say({noise!r})
"""


def run(body: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What a process does that imports the module, on a machine without GPUs."""
    environment = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    return subprocess.run(
        [sys.executable, "-c", START.format(noise="\n".join([*NOISE, CUINIT]) + "\n") + body],
        env={**environment, "CUDA_VISIBLE_DEVICES": "-1", **variables},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_known_lines_are_dropped_and_all_else_is_shown_in_order() -> None:
    done = run(
        "with start_lines_held():\n"
        "    say('first\\n'); noise(); print('second', file=sys.stderr); noise(); say('third')\n"
        "noise(); say('last\\n')\n"
    )
    assert done.returncode == 0
    assert done.stderr == "first\nsecond\nthird" + "\n".join([*NOISE, CUINIT, "last", ""])


def test_a_failure_shows_everything() -> None:
    done = run("with start_lines_held():\n    noise(); say('why\\n'); raise ValueError('no way')\n")
    assert done.returncode == 1
    for line in [*NOISE, CUINIT, "why", "ValueError: no way"]:
        assert line in done.stderr


def test_a_crash_shows_its_reason_and_what_was_held() -> None:
    done = run(
        "import faulthandler, signal; faulthandler.enable()\n"
        "with start_lines_held():\n"
        "    noise(); say('cannot map the library'); os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    assert done.returncode == -signal.SIGSEGV
    for text in [*NOISE, "cannot map the library", "Fatal Python error: Segmentation fault"]:
        assert text in done.stderr


def test_threads_are_read_while_the_import_lasts() -> None:
    done = run(
        "def bar():\n"
        "    for i in range(500): say(f'line {i}\\n')\n"
        "with start_lines_held():\n"
        "    thread = threading.Thread(target=bar); thread.start(); noise(); thread.join()\n"
        "    say('unfinished '); time.sleep(1.0); say('2026'); time.sleep(1.0); noise()\n"
    )
    assert done.returncode == 0
    assert "".join(f"line {i}\n" for i in range(500)) in done.stderr
    assert "unfinished 2026" in done.stderr  # passed on before their line had an end
    assert sum(done.stderr.count(line) for line in NOISE) <= 1  # what ended the line '2026'


def test_nothing_stays() -> None:
    done = run(
        "before = os.fstat(2), sorted(os.listdir('/proc/self/fd')), threading.active_count()\n"
        "for _ in range(3):\n"
        "    with start_lines_held():\n"
        "        with start_lines_held():\n"
        "            noise()\n"
        "after = os.fstat(2), sorted(os.listdir('/proc/self/fd')), threading.active_count()\n"
        "assert [after[0].st_ino, *after[1:]] == [before[0].st_ino, *before[1:]]\n"
        "try:\n"
        "    os.waitpid(-1, os.WNOHANG)\n"
        "except ChildProcessError:\n"
        "    print('no child')\n"
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("no child\n", "")


def test_a_child_that_lives_on_is_still_heard() -> None:
    done = run(
        "with start_lines_held():\n"
        "    child = subprocess.Popen(['sh', '-c', 'read x; echo heard >&2'],\n"
        "                             stdin=subprocess.PIPE)\n"
        "started = time.monotonic()\n"
        "child.communicate(b'go\\n'); time.sleep(0.3)\n"
    )
    assert done.returncode == 0
    assert done.stderr == "heard\n"


def test_another_file_that_was_put_there_stays() -> None:
    done = run(
        "with start_lines_held():\n"
        "    other = os.open('/dev/null', os.O_WRONLY); os.dup2(other, 2)\n"
        "print(os.path.sameopenfile(2, other))\n"
    )
    assert (done.returncode, done.stdout) == (0, "True\n")


@pytest.mark.parametrize(
    "before", ["os.close(2)\n", "sys.executable = '/no/such/python'\n", "sys.executable = ''\n",
               "sys.executable = '/bin/false'\n"],
)  # fmt: skip
def test_where_nothing_can_be_held_the_import_goes_on(before: str) -> None:
    done = run(before + "with start_lines_held():\n    print('imported')\n")
    assert (done.returncode, done.stdout) == (0, "imported\n")


def test_a_user_who_asks_for_the_lines_gets_them() -> None:
    done = run("with start_lines_held():\n    noise()\n", TF_CPP_MIN_LOG_LEVEL="0")
    assert done.stderr == "\n".join([*NOISE, CUINIT, ""])


def test_warnings_and_the_failure_of_a_gpu_that_is_there_are_shown() -> None:
    text = "\n".join([WARNED, CUINIT, ""]).encode()
    lines = Filter(known(no_gpu=False))
    assert lines.feed(text + INFO.encode() + b"\n" + DROP) == text
    assert Filter(known(no_gpu=True)).feed(text + DROP) == WARNED.encode() + b"\n"


def test_a_mark_in_pieces_is_a_mark() -> None:
    lines = Filter(known(no_gpu=True))
    assert lines.feed(INFO.encode() + b"\nshown") == b""
    assert lines.feed(SHOW[:5]) == lines.unfinished() == b""
    assert lines.feed(SHOW[5:] + b"after") == b"shown" + INFO.encode() + b"\nafter"
    assert lines.end() == b""


def test_a_package_named_tensorflow_is_held_when_it_is_imported(tmp_path: object) -> None:
    folder = os.path.join(str(tmp_path), "tensorflow")
    os.mkdir(folder)
    source = START.format(noise="\n".join(NOISE) + "\n") + (
        "noise(); say('loaded\\n')\n"
        "class config:\n"
        "    def list_physical_devices(kind): noise(); return []\n"
        "if os.environ.get('BROKEN'): raise ImportError('no library')\n"
    )
    with open(os.path.join(folder, "__init__.py"), "w") as file:
        file.write(source)
    body = (
        f"sys.path.insert(0, {str(tmp_path)!r}); import sparkdl, tensorflow, importlib\n"
        "importlib.reload(tensorflow)\n"
        "print(type(tensorflow.__loader__).__name__, 'TF_CPP_MIN_LOG_LEVEL' in os.environ)\n"
    )
    done = run(body)
    assert (done.returncode, done.stdout) == (0, "SourceFileLoader False\n")
    broken = run(body, BROKEN="1")
    assert broken.returncode == 1
    assert done.stderr == "loaded\nloaded\n"
    assert all(line in broken.stderr for line in [*NOISE, "loaded", "ImportError: no library"])
