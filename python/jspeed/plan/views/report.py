"""A plan as one self-contained HTML report: the tables of the terminal and the plot.

The page is a pure function of the plan. It loads no other file and runs no script.
"""

import re
from pathlib import Path

from markupsafe import Markup

from jspeed.files import write_whole
from jspeed.pages import render
from jspeed.pages.plots import INK, PALE
from jspeed.plan.schema import Plan
from jspeed.plan.views.formatting import duration, limits, number, range_text
from jspeed.plan.views.plot import drawing
from jspeed.plan.views.tables import doctor, stages, tables

ALT = "Bars of compute, memory and communication time of every stage, and of device memory by kind; as tables below"


def plan_html(path: Path, plan: Plan) -> None:
    """Write the report of ``plan`` to ``path``: one file without a script. Raises BadInput when it cannot."""
    write_whole(path, page(plan))


def page(plan: Plan) -> str:
    """Return the report as HTML text, headline numbers first."""
    first = {"stages": stages(plan), "doctor": doctor(plan)}
    return render(
        "plan/views/report.html",
        title=f"{plan['recipe']} on {plan['target']}",
        plan={**plan, "warnings": limits(plan)},
        cards=cards(plan),
        figure=figure(plan),
        tables=first | {"rest": list(tables(plan))},
    )


def cards(plan: Plan) -> dict[str, str]:
    """Return the headline numbers by name."""
    cost = plan["predicted_cost"]
    return {
        "step": range_text(plan["predicted_step_ms"], "ms"),
        "time to target": duration(plan["predicted_seconds"]),
        f"cost at {number(cost['per_device_hour'])} {cost['currency']} per device-hour": range_text(
            (cost["low"], cost["high"]), cost["currency"]
        ),
        "devices": f"{plan['devices']} x {plan['device_kind']}",
        "mesh and layout": f"{' '.join(f'{axis}={n}' for axis, n in plan['mesh'].items())}, {plan['layout']}",
        "parameters": f"{plan['parameters']:,}",
    }


def figure(plan: Plan) -> Markup:
    """Return the plot as an SVG element in the colours of the page."""
    svg = drawing(plan, heading=False)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = svg.replace(INK, "currentColor").replace(PALE, "var(--line)")
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{ALT}"', 1))
