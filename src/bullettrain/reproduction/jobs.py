"""Several runs, one after another or some at once on one device, each in a process of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from rich.console import Console

from bullettrain.data import DataError
from bullettrain.reproduction.rows import Outcome, Task, perform
from bullettrain.training.settings import ConfigError
from bullettrain.training.signals import StopRequest

Told = Callable[[Outcome], None]


def run_all(
    tasks: Sequence[Task], *, jobs: int, console: Console | None, begun: Callable[[Task], None], ended: Told
) -> int | None:
    """Do all ``tasks``; the signal that stopped them, if one did. A run that fails does not stop the others."""
    if jobs > 1 and len(tasks) > 1:
        return _Pool(tasks, min(jobs, len(tasks)), begun, ended).run()
    for task in tasks:
        begun(task)
        outcome = perform(task, console)
        ended(outcome)
        if outcome.signal is not None:
            return outcome.signal
    return None


class _Pool:
    """Processes that each do one task at a time; a request to stop is handed on, and what is begun is saved."""

    def __init__(self, tasks: Sequence[Task], jobs: int, begun: Callable[[Task], None], ended: Told) -> None:
        self.left, self.jobs, self.begun, self.ended = list(tasks), jobs, begun, ended
        self.at_work: dict[Connection, tuple[BaseProcess, Task | None]] = {}
        # Spawned: a fork would copy CUDA and threads.
        self.context = multiprocessing.get_context("spawn")

    def run(self) -> int | None:
        """All tasks; the signal that stopped them."""
        asked = False
        with StopRequest() as stop:
            try:
                for _ in range(self.jobs):
                    self._start()
                while self.at_work:
                    for ready in wait(list(self.at_work), timeout=0.2):
                        assert isinstance(ready, Connection)
                        self._hear(ready, going_on=stop.signal is None)
                    if stop.signal is not None and not asked:
                        asked = True
                        for process, _ in self.at_work.values():
                            process.terminate()  # SIGTERM: a run finishes its step, saves and says so
            finally:
                for pipe, (process, _) in self.at_work.items():
                    process.terminate()
                    pipe.close()  # what waits for a next task gets none
                for process, _ in self.at_work.values():
                    process.join()
        return stop.signal

    def _start(self) -> None:
        mine, theirs = self.context.Pipe()
        process = self.context.Process(target=_work, args=(theirs,))
        process.start()
        theirs.close()
        self.at_work[mine] = (process, None)
        self._give(mine)

    def _give(self, pipe: Connection) -> None:
        """The next task, or the end."""
        process, _ = self.at_work[pipe]
        if not self.left:
            pipe.send(None)
            process.join()
            del self.at_work[pipe]
            return
        task = self.left.pop(0)
        self.begun(task)
        self.at_work[pipe] = (process, task)
        with contextlib.suppress(OSError):  # it has died: its end of the pipe will say so
            pipe.send(task)

    def _hear(self, pipe: Connection, *, going_on: bool) -> None:
        process, task = self.at_work[pipe]
        assert task is not None
        try:
            answer = pipe.recv()
        except (EOFError, ConnectionResetError):
            process.join()
            del self.at_work[pipe]
            if going_on:  # it died: out of memory, or killed
                self.ended(Outcome(task.name, problem=f"its process ended with status {process.exitcode}"))
                if self.left:
                    self._start()
            return
        if isinstance(answer, Exception):
            raise answer  # the user's mistake: no other run would do better
        self.ended(answer)
        if not going_on:
            self.left.clear()
        self._give(pipe)


def _work(pipe: Connection) -> None:
    """A process of the pool: tasks in, outcomes out."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # Ctrl-C reaches the first process alone, which hands it on once
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt, EOFError, OSError):
        while (task := pipe.recv()) is not None:
            pipe.send(_answer(task))


def _answer(task: Task) -> Outcome | Exception:
    """The outcome, or the user's mistake, for the first process to raise."""
    try:
        return perform(task)
    except (ConfigError, DataError, ImportError) as error:
        return type(error)(str(error))


def _end_with_parent() -> None:
    """A process whose parent was killed would train on for nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
