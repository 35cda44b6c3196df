# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""make mutate: plants, asks, and says what survives."""

from __future__ import annotations

import argparse
import ast
import json
import os
import queue
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..support import verdict_file
from . import changes, lines
from .changes import ROOT, Mutant, digest
from .lines import Map, Test, World
from .reasons import reason
from .server import Server

VERDICTS = ROOT / "tests/records/generated/verdicts.json"
_LEAST = 0.95  # of those that change anything
_COUNT = 600
_FEW = 6  # tests at first
_BUDGET = 60.0  # seconds of tests, as they were traced
_MOST = 150  # tests


@dataclass
class Verdict:
    test: str  # "": it survived
    said: str
    made: str  # digest of the file's tree and of the test's


def read() -> dict[str, Verdict]:
    return verdict_file.read(VERDICTS, Verdict)


def chosen(found: list[Mutant], seed: int) -> list[Mutant]:
    """In the order in which they are taken: of each kind in each file one, then the second of each.
    The order of two does not depend on others."""
    drawn = sorted(found, key=lambda x: digest(f"{seed} {x.title}"))
    counted: Counter[tuple[str, str]] = Counter()
    ranked = []
    for mutant in drawn:
        ranked.append((counted[mutant.file, mutant.kind], len(ranked), mutant))
        counted[mutant.file, mutant.kind] += 1
    return [mutant for *_, mutant in sorted(ranked, key=lambda x: x[:2])]


def made(mutant: Mutant, test: str) -> str:
    file = ROOT / recorded(test).id.partition("::")[0]
    texts = [changes.source(mutant.file).text, file.read_text() if file.is_file() else ""]
    return digest("".join(_dumped(text) for text in texts))


@cache
def _dumped(text: str) -> str:
    return ast.dump(ast.parse(text))


class Asker:
    """Servers of all worlds, for one thread."""

    def __init__(self, sound: dict[str, bool]) -> None:
        self._servers: dict[World, Server] = {}
        self._sound = sound  # by name: whether a test passes in such a process by itself

    def __call__(self, plant: str, tests: list[Test]) -> tuple[str, str] | None:
        """(test, what it said) of the first that notices."""
        while asked := [x for x in tests if self._sound.get(x.name, True)]:
            found = self._first(plant, asked)
            if found is None:
                return None
            test = found[0]
            if test not in self._sound:
                self._sound[test] = self._first(None, [recorded(test)]) is None
            if self._sound[test]:
                return found
            print(f"not asked, since it fails by itself: {test}", flush=True)
        return None

    def _first(self, plant: str | None, tests: list[Test]) -> tuple[str, str] | None:
        """World by world."""
        by_world: dict[World, list[Test]] = defaultdict(list)
        for test in tests:
            by_world[test.world].append(test)
        for world, here in by_world.items():
            if world not in self._servers:
                self._servers[world] = Server(world)
            server = self._servers[world]
            ids = [test.id for test in here]
            seconds = 90 + 10 * sum(test.seconds for test in here)
            answer = server.ask(plant, ids, seconds)
            if answer.missing:  # old ids, or the mistake's work?
                gone = set(server.ask(None, ids, seconds).missing)
                if not gone:
                    return here[0].name, "it is not collected any more"
                ids = [id for id in ids if id not in gone]
                answer = server.ask(plant, ids, seconds) if ids else answer
            if answer.noticed:
                # an import that fails is noticed by whoever imports
                by = Test(world, answer.test, 0) if "::" in answer.test else here[0]
                return by.name, " ".join(answer.said.replace(f"{ROOT}/", "").split())[:100]
        return None

    def close(self) -> None:
        for server in self._servers.values():
            server.close()


def _parts(tests: list[Test]) -> Iterator[list[Test]]:
    """The few most promising, then what the budget allows."""
    yield tests[:_FEW]
    rest: list[Test] = []
    left = _BUDGET - sum(test.seconds for test in tests[:_FEW])
    for test in tests[_FEW:_MOST]:
        left -= test.seconds
        if left < 0:
            break
        rest.append(test)
    if rest:
        yield rest


class Run:
    def __init__(
        self, chosen: list[Mutant], known: Map, verdicts: dict[str, Verdict], keep: bool = True
    ) -> None:
        self.keep = keep
        self.waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
        for mutant in chosen:
            self.waiting.put(mutant)
        self.known, self.verdicts, self.lock = known, verdicts, threading.Lock()
        self.total, self.done = len(chosen), 0
        self.noticed: Counter[tuple[str, str]] = Counter()
        places = {mutant.title: mutant for mutant in changes.mutants()}
        for title, verdict in verdicts.items():
            if verdict.test and title in places:
                self._count(places[title], verdict.test)
        self.sound = {x.test: True for x in verdicts.values() if x.test}
        self.named = {x.test: recorded(x.test) for x in verdicts.values() if x.test}

    def _count(self, mutant: Mutant, test: str) -> None:
        self.noticed[mutant.place, test] += 1
        self.noticed[mutant.file, test] += 1

    def tests(self, mutant: Mutant) -> list[Test]:
        before = self.verdicts.get(mutant.title)
        first = before.test if before else ""
        asked = {x.name: x for x in self.known.asked(mutant)}
        if first:
            asked.setdefault(first, self.named[first])
        if not self.known.tests:  # without a map: those that noticed others of the file
            of_file = {x for (place, x) in self.noticed if place == mutant.file}
            asked |= {x: self.named[x] for x in of_file if x in self.named}

        def order(x: Test) -> tuple[bool, int, int, float]:
            here, near = self.noticed[mutant.place, x.name], self.noticed[mutant.file, x.name]
            return (x.name != first, -here, -near, x.seconds)

        return sorted(asked.values(), key=order)

    def work(self) -> None:
        asker = Asker(self.sound)
        with tempfile.TemporaryDirectory() as folder:
            plant = Path(folder) / "plant"
            while True:
                try:
                    mutant = self.waiting.get_nowait()
                except queue.Empty:
                    break
                began = time.perf_counter()
                with self.lock:
                    tests = self.tests(mutant)
                target = os.path.realpath(ROOT / mutant.file)
                text = changes.source(mutant.file).planted(mutant)
                plant.write_text(json.dumps([target, text]))
                found = None
                for part in _parts(tests):
                    found = asker(str(plant), part)
                    if found:
                        break
                test, said = found or ("", "")
                with self.lock:
                    self._keep(mutant, test, said, len(tests), time.perf_counter() - began)
        asker.close()

    def _keep(self, mutant: Mutant, test: str, said: str, asked: int, seconds: float) -> None:
        self.verdicts[mutant.title] = Verdict(test, said, made(mutant, test))
        if test:
            self._count(mutant, test)
            self.named[test] = recorded(test)
        if self.keep:
            verdict_file.write(VERDICTS, self.verdicts)
        self.done += 1
        by = f"by {test.replace('tests/', '')}" if test else f"SURVIVES {asked} tests"
        print(f"{self.done} of {self.total}, {seconds:.0f} s: {mutant.title}: {by}", flush=True)


def recorded(name: str) -> Test:
    """The test of a name."""
    world, at, id = name.partition("tests/")
    pairs = [each.partition("=") for each in world.split()]
    return Test(tuple((x, y) for x, _, y in pairs), at + id, 1.0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("--sample", type=int, help="so many of those with a verdict")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=_COUNT, help="mistakes of a whole run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", help="part of a title")
    parser.add_argument("--untraced", action="store_true", help="with the map that is there")
    options = parser.parse_args()
    verdicts = read()
    every = changes.mutants()
    if options.only:
        every = [mutant for mutant in every if options.only in mutant.title]
    if options.sample is not None:
        every = [x for x in every if x.title in verdicts and verdicts[x.title].test]
        return _sample(chosen(every, options.seed)[: options.sample], verdicts, options.jobs)
    with ThreadPoolExecutor(options.jobs) as threads:
        old = [] if options.untraced else lines.old()
        for path, said in zip(old, threads.map(lines.trace, old), strict=True):
            print(f"traced {path.name}: {said}", flush=True)
    known = lines.read()
    found, unreached, asked = chosen(every, options.seed), [], []
    for mutant in found:
        if len(asked) == options.count:
            break
        (asked if known.asked(mutant) else unreached).append(mutant)
    run = Run([x for x in asked if not _settled(x, verdicts)], known, verdicts)
    _work(run, options.jobs)
    return _report(asked, unreached, verdicts)


def _settled(mutant: Mutant, verdicts: dict[str, Verdict]) -> bool:
    """Noticed by a test that is as it was, in a file that is."""
    before = verdicts.get(mutant.title)
    if before is None or not before.test:
        return before is not None and reason(mutant) is not None
    return before.made == made(mutant, before.test)


def _work(run: Run, jobs: int) -> None:
    threads = [threading.Thread(target=run.work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _report(asked: list[Mutant], unreached: list[Mutant], verdicts: dict[str, Verdict]) -> int:
    noticed = [x for x in asked if verdicts[x.title].test]
    explained = [x for x in asked if not verdicts[x.title].test and reason(x)]
    wrong = [x for x in noticed if reason(x)]
    survive = [x for x in asked if x not in explained and not verdicts[x.title].test]
    rate = len(noticed) / max(1, len(asked) - len(explained))
    print(
        f"{len(asked)} mistakes: {len(noticed)} noticed, {len(explained)} change nothing, "
        f"{len(survive)} survive: {rate:.1%}; {len(unreached)} more where no test here comes by"
    )
    for mutant in survive:
        print(f"survives: {mutant.title}")
    for mutant in wrong:
        print(f"FAIL explained, but noticed: {mutant.title}")
    return int(rate < _LEAST or bool(wrong))


def _sample(asked: list[Mutant], verdicts: dict[str, Verdict], jobs: int) -> int:
    """Were noticed: are they still?  Nothing is kept."""
    again = dict(verdicts)
    _work(Run(asked, Map(), again, keep=False), jobs)
    lost = [x for x in asked if not again[x.title].test]
    for mutant in lost:
        print(f"FAIL {verdicts[mutant.title].test} noticed it, now none does: {mutant.title}")
    print(f"{len(asked) - len(lost)} of {len(asked)} noticed")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
