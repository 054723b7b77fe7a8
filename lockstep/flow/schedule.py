"""What a schedule could reach:

longest paths and list schedules of given durations (Graham 1969, section 2).
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """lane: where it runs, one at a time. seconds: its duration. after: tasks that come before it."""

    lane: str
    seconds: float
    after: Sequence[int]


def critical_path(tasks: Mapping[int, Task]) -> tuple[float, list[int]]:
    """Seconds and numbers of the longest chain of tasks that wait for each other.

    Numbers are a topological order.
    """
    ends: dict[int, float] = {}
    comes_from: dict[int, int] = {}
    for number in sorted(tasks):
        before = [b for b in tasks[number].after if b in tasks]
        latest = max(before, key=lambda b: ends[b], default=None)
        ends[number] = tasks[number].seconds + (0.0 if latest is None else ends[latest])
        if latest is not None:
            comes_from[number] = latest
    if not ends:
        return 0.0, []
    path = [max(ends, key=lambda n: ends[n])]
    while path[-1] in comes_from:
        path.append(comes_from[path[-1]])
    return ends[path[0]], path[::-1]


def list_schedule(tasks: Mapping[int, Task], workers: Mapping[str, int] | None = None) -> float:
    """Seconds until all are done, if each lane always takes the ready task with the smallest number.

    workers: of each lane, one where it is not said.
    """
    missing = {number: sum(b in tasks for b in set(task.after)) for number, task in tasks.items()}
    next_ones: dict[int, list[int]] = {number: [] for number in tasks}
    for number, task in tasks.items():
        for before in set(task.after) & tasks.keys():
            next_ones[before].append(number)
    free = {task.lane: (workers or {}).get(task.lane, 1) for task in tasks.values()}
    ready: dict[str, list[int]] = {lane: [] for lane in free}
    for number in sorted(tasks):
        if not missing[number]:
            heapq.heappush(ready[tasks[number].lane], number)
    running: list[tuple[float, int]] = []
    now = 0.0
    while True:
        for lane, waiting in ready.items():
            while waiting and free[lane]:
                free[lane] -= 1
                number = heapq.heappop(waiting)
                heapq.heappush(running, (now + tasks[number].seconds, number))
        if not running:
            return now
        now, done = heapq.heappop(running)
        free[tasks[done].lane] += 1
        for number in next_ones[done]:
            missing[number] -= 1
            if not missing[number]:
                heapq.heappush(ready[tasks[number].lane], number)
