"""How often a run was started again, for an estimate of how often it fails."""

from __future__ import annotations

from datetime import datetime

from everystep.errors import StoreError
from everystep.store.run import Run


def restarts_of(run: Run, rank: int) -> tuple[int, float]:
    """How often training went on where the session before it had been, and for how long all
    sessions are known to have lived: from their start to the newest of their steps still there.

    A session that went back to an older step was started for that, not by a failure. One that went
    on may have been stopped by hand: that is not known, and counted.
    """
    listing = run.listing()
    newest = {entry.session: entry for entry in listing.steps if rank < entry.world_size}
    observed_s, restarts = 0.0, 0
    for before, session in zip((None, *listing.sessions), listing.sessions, strict=False):
        went_on = session.restored is not None and before is not None
        restarts += went_on and before is not None and before.timeline == session.timeline
        entry = newest.get(session.session)
        if entry is not None:
            try:
                seen = run.record(entry, rank).created
                observed_s += max((_moment(seen) - _moment(session.created)).total_seconds(), 0.0)
            except (StoreError, ValueError):
                continue
    return restarts, observed_s


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))
