"""Sets of times as sorted, disjoint intervals."""

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """union([(0, 2), (1, 3), (5, 6)])  ->  [(0, 3), (5, 6)]"""
    joined: list[Interval] = []
    for start, end in sorted(each for each in intervals if each[1] > each[0]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def common(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """What is in both: common([(0, 3)], [(1, 2), (2.5, 9)])  ->  [(1, 2), (2.5, 3)]"""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """What is in `first` alone: without([(0, 3)], [(1, 2)])  ->  [(0, 1), (2, 3)]"""
    left: list[Interval] = []
    for start, end in first:
        for begin, stop in common([(start, end)], second):
            if begin > start:
                left.append((start, begin))
            start = stop
        if start < end:
            left.append((start, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
