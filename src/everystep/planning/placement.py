"""Which ranks hold copies of which: on other hosts, so that any `copies - 1` hosts may die.

Source: Gemini (SOSP 2023), "mixed placement": hosts in groups of `copies`, each of which holds
copies of all others of its group; those that fill no group join the last one in a ring. Groups
leave the fewest ways for `copies` hosts that die at once to take a whole group along.
"""

from __future__ import annotations

from collections.abc import Sequence


def placement(hosts: Sequence[str], copies: int) -> list[tuple[int, ...]]:
    """The ranks that hold a copy of each rank's state beside its own.

    Depends on nothing but the arguments, so that ranks need not talk. Ranks of one host are spread
    over those of the other.

    Args:
        hosts: the host of each rank.
        copies: so many hosts have the state, the rank's own included; where there are fewer, as
            many as there are.
    """
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    order = list(ranks)
    partners = {order[i]: [order[j] for j in others] for i, others in _partners(len(order), copies)}
    return [
        tuple(ranks[other][ranks[host].index(rank) % len(ranks[other])] for other in partners[host])
        for rank, host in enumerate(hosts)
    ]


def _partners(count: int, copies: int) -> list[tuple[int, list[int]]]:
    """Each host's number, and those of the hosts that hold its copies."""
    copies = max(1, min(copies, count))
    rest = count % copies
    grouped = count - rest - (copies if rest else 0)
    found = []
    for host in range(count):
        first, size = (host - host % copies, copies) if host < grouped else (grouped, 0)
        size = size or count - grouped
        others = [first + (host - first + n) % size for n in range(1, copies)]
        found.append((host, others))
    return found
