"""Kill or stop a process: the others exit soon with the cause, and a restart gives an undisturbed
run's result."""

import signal

from jspeed.cluster.rendezvous import free_port

from .conftest import Run

# seconds from a fault to the launcher's end: gloo or the service, then launch.py's 5 s and its
# grace
SETTLES = 25

ENDED = "error: process {} exited without an error message; see its output or its launcher's"


def test_a_worker_and_then_process_0_are_killed(run, undisturbed):
    run.resumable(launch="--standalone --max-restarts 2").until(50)
    first = run.kill(1)
    run.wait_for(lambda: "launch: restart 1 of 2" in run.said(), SETTLES)
    run.until(110)
    second = run.kill(0)
    run.wait_for(lambda: "launch: restart 2 of 2" in run.said(), SETTLES)
    assert run.ended(120) in (0, 1), run.said()
    assert run.is_as(undisturbed)
    assert all(
        step in steps for step, steps in zip(run.record()["resumed"], (first, second), strict=True)
    )
    killed = "launch: rank {} was killed by SIGKILL"
    said = run.said().splitlines()
    assert sorted(said[:2]) == [ENDED.format(1), killed.format(1)]
    assert said[2] == "launch: restart 1 of 2"
    assert sorted(said[3:5]) == [ENDED.format(0), killed.format(0)]
    assert said[5:] == ["launch: restart 2 of 2"]


def test_silent_processes_count_as_dead(run, undisturbed):
    run.resumable(launch="--standalone --max-restarts 2", JSPEED_HEARTBEAT_SECONDS=6)
    allowed = []
    for rank, step, restart in [(1, 50, 1), (0, 110, 2)]:
        run.until(step)
        allowed.append(run.kill(rank, signal.SIGSTOP))
        run.wait_for(
            lambda restart=restart: f"launch: restart {restart} of 2" in run.said(), 6 + SETTLES
        )
        error = (
            f"error: no heartbeat from process {rank} for 6 s: it was stopped, hangs, or is"
            " unreachable"
        )
        assert run.errors()[restart - 1 :] == [error]
    assert run.ended(120) in (0, 1), run.said()
    assert run.is_as(undisturbed)
    assert all(step in steps for step, steps in zip(run.record()["resumed"], allowed, strict=True))


def test_sigterm_saves_on_all_and_a_restart_goes_on_from_there(run, undisturbed):
    run.start("--resume", launch="--standalone --max-restarts 1").until(110)
    run.process.send_signal(signal.SIGTERM)
    assert run.ended(60) == 143 and not run.said()
    (step,) = run.checkpoints()
    assert int(step) >= 110 and run.record()["status"] == "interrupted"
    assert run.start("--resume").ended(120) in (0, 1), run.said()
    assert run.is_as(undisturbed) and run.record()["resumed"] == [int(step)]


def test_a_kill_within_a_save_leaves_nothing_that_looks_whole(run, undisturbed):
    run.resumable().until(90)
    run.wait_for(lambda: list((run.path / "checkpoints").glob("*tmp*")))
    run.kill(0)
    assert run.ended(SETTLES) == 128 + 9
    last = run.newest()
    assert run.resumable().ended(120) in (0, 1), run.said()
    assert run.is_as(undisturbed) and run.record()["resumed"] == [last]
    assert run.checkpoints() == ["140", "160"]


def test_the_same_run_started_twice(run, undisturbed, folder):
    """The second one, at the same port and in the same folder, ends with an error message; the
    first runs on."""
    launch = f"--master-port {free_port()}"
    run.resumable(launch=launch).until(60)
    twin = Run(folder, f"{run.name}-twin")
    twin.path.symlink_to(run.name)
    assert twin.resumable(launch=launch).ended(60) == 2
    (error,) = twin.said().splitlines()
    assert error.startswith("error: another run is writing to")
    assert run.ended(120) in (0, 1) and not run.said()
    assert run.is_as(undisturbed) and run.record()["resumed"] == []
