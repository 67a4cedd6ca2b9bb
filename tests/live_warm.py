"""An interpreter with everything imported that forks a program per request, which saves each program its slow start.

Requests come as lines of JSON on standard input, the process id of each program goes to standard output. What is at the
end of this file runs in the forked program only, at the top of its `__main__`: uncaught errors, exit codes and the end
of the interpreter are the real ones. The exit code is left in a file, since only the parent of a process learns it.
"""

from __future__ import annotations

import json
import os
import resource
import select
import sys
import types
from pathlib import Path
from typing import Any

import deepspeed.ops
import deepspeed.runtime.zero.muon.original_muon

import lightning_zenflow.zero.install  # noqa: F401
import tests.live_training  # noqa: F401

deepspeed.ops.__compatible_ops__  # noqa: B018  (looks for a compiler, once)


def next_program() -> dict[str, Any]:
    """Returns what to run, in the forked program; the server stays inside until its standard input ends."""
    running: dict[int, str] = {}
    while True:
        readable, _, _ = select.select([0], [], [], 0.01 if running else None)
        if readable:
            line = sys.stdin.buffer.readline()  # one at a time: the other side waits for the reply
            if not line:
                break
            request: dict[str, Any] = json.loads(line)
            pid = os.fork()
            if pid == 0:
                return request
            running[pid] = request["code_file"]
            os.write(1, f"pid {pid}\n".encode())
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                partial = Path(running.pop(pid) + ".part")
                partial.write_text(str(os.waitstatus_to_exitcode(status)))
                partial.rename(partial.with_suffix(""))
    for pid in running:
        os.kill(pid, 9)
    os._exit(0)


def become(request: dict[str, Any]) -> None:
    """Gives this process the session, environment, output and limits that the program would have had."""
    os.setsid()
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    for path, flags, fd in ((os.devnull, os.O_RDONLY, 0), (request["log"], os.O_WRONLY | os.O_APPEND, 1)):
        opened = os.open(path, flags)
        os.dup2(opened, fd)
        os.close(opened)
    os.dup2(1, 2)
    if request["address_space_bytes"]:
        resource.setrlimit(resource.RLIMIT_AS, (request["address_space_bytes"],) * 2)
    sys.argv = [request["script"]]


request = next_program()
become(request)
server, program = sys.modules["__main__"], types.ModuleType("__main__")
program.__file__ = request["script"]
sys.modules["__main__"] = program
exec(compile(Path(request["script"]).read_text(), request["script"], "exec"), program.__dict__)
