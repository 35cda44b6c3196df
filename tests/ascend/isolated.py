# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Calls in processes of their own: a crash is an answer, not the end of the run."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

_context = multiprocessing.get_context("fork")


class Crash(RuntimeError):
    """The process died, or the call raised; the message is its last word."""


def _child(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send((True, function(*arguments)))
    except BaseException as error:  # whatever it was, the parent reports it
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
        text = f"{type(error).__name__}: {str(error)[-400:]} ({where})"
        pipe.send((False, text))
    pipe.close()


def each(
    function: Callable[..., Any], calls: Iterable[tuple[Any, ...]], jobs: int
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(call, result or Crash), as they finish; `jobs` processes at a time."""
    waiting = list(calls)[::-1]
    running: dict[Connection, tuple[Any, tuple[Any, ...]]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            call = waiting.pop()
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(target=_child, args=(theirs, function, call))
            process.start()
            theirs.close()
            running[ours] = (process, call)
        for pipe in wait(list(running)):
            process, call = running.pop(pipe)  # type: ignore[index]
            try:
                fine, answer = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                fine, answer = False, None
            process.join()
            if answer is None and process.exitcode:
                code = process.exitcode
                name = signal.Signals(-code).name if code < 0 else f"status {code}"
                answer = f"the process died of {name}" + (
                    ": a read or write out of range" if name in ("SIGSEGV", "SIGBUS") else ""
                )
            yield call, answer if fine else Crash(answer)
