"""``jspeed audit``: score the parameters of a run again, with probes drawn anew."""

from pathlib import Path
from typing import Annotated

from jspeed.base.files import write_whole
from jspeed.base.standard_streams import printable, without_logs
from jspeed.cli.flags import Command
from jspeed.fields import Folder, Wants


def audit(
    run: Annotated[Path, Wants("RUN", positional=True)],
    weights: Annotated[Path | None, Wants("FILE|DIR")] = None,
    data: Folder | None = None,
    trust: bool = False,
    keep: bool = False,
) -> int:
    """Compute a run's loss again from its parameters, and look whether its recipe sees what comes
    later; exit code 1 where something is wrong.

    How the parameters were learned, and in what time, an audit cannot tell: jspeed leaderboard
    reproduce runs the recipe again.

    Args:
        run: A run directory, or the file of a run among the records.
        weights: The model.safetensors that the run ended with, or its folder; default: beside RUN.
        data: Folder of the run's shards; default: the recipe's data in the cache folder.
        trust: Run the recipe's Python code though it is none of jspeed's and was not trained here.
        keep: Write audit-HASH.json beside the record, which then counts as audited.
    """
    with without_logs():
        from jspeed.inference.audit import audit as audit_run
        from jspeed.record.audits import file_of

    found, made = audit_run(run, weights, data, trust)
    for what, says, right in found:
        print(f"{'ok   ' if right else 'WRONG'} {what}: {printable(says)}")
    wrong = sum(not each.right for each in found)
    if keep and not wrong:
        name, content = file_of(made)
        path = (run if run.is_dir() else run.parent) / name
        write_whole(path, content.decode())
        print(f"wrote {path}")
    print(f"{printable(str(run))}: {f'{wrong} things are wrong' if wrong else 'audited'}")
    return 1 if wrong else 0


COMMAND = Command(
    audit,
    (
        "runs/mine  # what a run of yours ended with",
        "records/TRACK/RECIPE/RUN.json --weights model.safetensors  # a record, its model fetched",
    ),
)
