"""Regression test: XLA:CPU aborts when too many steps are queued (eight virtual devices on two
cores)."""

from ..multi_process import SAME_BITS, ended, environment, metrics, start, toy


def test_300_steps_on_8_virtual_devices_twice(tmp_path, folder):
    """Without NPROC=16, which hides it: 64 steps in flight ended 3 runs of 3 by code 134."""
    fields = toy("STEPS=300", "EVAL_EVERY=300")
    variables = {
        name: value
        for name, value in environment(**SAME_BITS, JSPEED_CACHE=folder / "cache").items()
        if name != "NPROC"
    }
    losses = []
    for number in range(2):
        words = ["--mesh", "data=8", "--data", folder / "shards", "--run-dir", str(number), *fields]
        ((code, _, err),) = ended([start(tmp_path, variables, *words)], 120)
        assert code in (0, 1) and not err, (number, code, err)
        losses.append(metrics(tmp_path / str(number)))
    assert len(losses[0]) == 300 and losses[0] == losses[1]
