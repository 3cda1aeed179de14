"""Several runs, one after another or some at once on one device, each in a process of its own."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

from rich.console import Console

from bullettrain.reproduction.tasks import Task, TaskResult, perform
from bullettrain.training.signals import StopRequest

SPAWN = multiprocessing.get_context("spawn")
"""A fork would copy CUDA and threads."""
logger = logging.getLogger(__name__)


def run_all(tasks: Sequence[Task], *, jobs: int, console: Console | None) -> list[TaskResult]:
    """Do all ``tasks``, and after a signal none that is not begun. A run that fails does not stop the others."""
    results: list[TaskResult] = []
    if jobs > 1:
        return _run_pool(tasks, jobs)
    for number, task in enumerate(tasks, 1):
        logger.info("%d/%d  %s  %s", number, len(tasks), task.label, task.name)
        results.append(perform(task, console))
        if results[-1].signal is not None:
            break
    return results


def _run_pool(tasks: Sequence[Task], jobs: int) -> list[TaskResult]:
    results: list[TaskResult] = []
    with StopRequest() as stop, ProcessPoolExecutor(jobs, SPAWN, _start_worker) as pool:
        left: dict[Future[TaskResult], Task] = {pool.submit(perform, task): task for task in tasks}
        try:
            while left:
                done, _ = wait(left, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in done:
                    results.append(_result(future, left.pop(future)))
                    logger.info("%d/%d  done  %s", len(results), len(tasks), results[-1].name)
                if stop.signal is not None and left:
                    pool.shutdown(wait=False, cancel_futures=True)
                    _end_workers()  # SIGTERM: a run finishes its step, saves and says so
                    left = {future: task for future, task in left.items() if not future.cancelled()}
                    results += [_result(future, task) for future, task in left.items()]
                    break
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            _end_workers()
            raise
    return results if stop.signal is None else [*results, TaskResult("", signal=stop.signal)]


def _result(future: Future[TaskResult], task: Task) -> TaskResult:
    """How a run went; the user's mistakes are raised."""
    try:
        return future.result()
    except BrokenProcessPool:
        return TaskResult(task.name, problem="stopped, since a process was killed; the same command continues it")


def _start_worker() -> None:
    """Ctrl-C reaches the first process alone, which hands it on once; and a worker ends with the first process."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # between two runs; a run has a handler of its own
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _end_workers() -> None:
    for worker in multiprocessing.active_children():
        worker.terminate()
