"""Job.whole: a worker may say that a load has ended well on its own, so it is set on a job that is all of one only."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload.messages import Job, JobKind
from kvoffload.testing.faults import Failing, Gated, Op
from kvoffload.testing.rig import Keys, Rig, Sizes

BLOCKS = 10


def loads(rig: Rig) -> list[Job]:
    """The load jobs that the movers are sent from now on."""
    found: list[Job] = []
    mover = rig.local.movers[0]
    submit = mover.submit

    def watched(plans, after=None) -> None:
        found.extend(job for job in plans.jobs if job.kind is JobKind.LOAD)
        submit(plans, after)

    mover.submit = watched
    return found


def on_disk(rig: Rig) -> Keys:
    """A chain that only the disk holds."""
    chain = Keys.of(range(BLOCKS))
    rig.store(chain)
    rig.store(Keys.of(range(900, 900 + 32)))
    assert rig.match(chain).disk == BLOCKS
    return chain


def test_a_load_from_host_is_one_whole_job():
    """Nothing is waited for or failed: one job, and it is whole."""
    with Rig(Sizes(host=4)) as rig:
        chain = Keys.of(range(BLOCKS))
        rig.store(chain)
        seen = loads(rig)
        finished = rig.load(chain)[1]

        assert [job.whole for job in seen] == [True]
        assert finished[-1].boundary == BLOCKS * 16


@pytest.mark.parametrize("bad", [0, 4, BLOCKS - 1])
def test_what_is_left_of_a_load_is_not_whole(tmp_path: Path, bad: int):
    """A load waits for a prefetch, one block of which cannot be read: the copies of the others are not all of it."""
    fail, gate = Failing(ops={Op.READ}), Gated(ops={Op.READ}, is_open=True)
    with Rig(Sizes(host=4, disk=10), path=tmp_path, tier_faults=[fail, gate]) as rig:
        chain = on_disk(rig)
        fail.keys = {chain.keys[bad].tobytes()}
        info, pages = rig.info(), rig.pages(chain)
        rig.wipe()
        rig.planner.match(info, chain)
        gate.hold()
        rig.planner.prefetch(info, chain, deadline=100.0)
        rig.local.step()
        seen = loads(rig)
        plan = rig.planner.load(info, chain, BLOCKS * 16, pages)
        rig.local.step()
        gate.release()
        finished = {f.id: f for f in rig.local.drain()}

        assert finished[plan.id].boundary == bad * 16
        assert [job.whole for job in seen] == [False]
        assert rig.mismatches(chain, pages, 0, bad) == 0


def test_a_retry_is_not_whole(tmp_path: Path):
    """The second try of a failed copy is a part of the load, though nothing else runs."""
    fail = Failing(ops={Op.TO_DEVICE}, times=1)
    with Rig(Sizes(host=4), copy_faults=[fail]) as rig:
        chain = Keys.of(range(BLOCKS))
        rig.store(chain)
        fail.keys = {chain.keys[3].tobytes()}
        seen = loads(rig)
        finished = rig.load(chain)[1]

        assert finished[-1].boundary == BLOCKS * 16
        assert [job.whole for job in seen] == [True, False]
