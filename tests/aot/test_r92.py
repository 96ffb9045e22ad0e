"""Record 92 at full size, as XLA compiles its longest step for eight H100s: a table of 16 GB a
device in place."""

import pytest

from jspeed.model.custom_kernels import label
from jspeed.plan.cost import TRITON
from jspeed.recipes import r92

from .custom_calls import custom_calls
from .runs import step_of_a_run

pytestmark = pytest.mark.slow  # minutes of compiling: make test-aot ARGS='-m slow'


def test_the_table_is_updated_in_place(mesh):
    """The step of a long stage that updates everything."""
    step = step_of_a_run(mesh(8), "r92", 3, 3)
    table = f"bf16[{r92.NGRAMS // 8},{r92.WIDTH}]"
    text = step.program.as_text()
    lines = [line for line in text.splitlines() if table in line]
    assert lines and not [line for line in lines if " copy(" in line or "copy-start(" in line]
    own = [call.attributes for call in custom_calls(text, TRITON)]
    assert [
        sum(f'name = "{label("row_sums", name)}"' in each for each in own)
        for name in ("sum_rows", "row_adam")
    ] == [1, 1]
    arguments = 2 * r92.NGRAMS // 8 * r92.WIDTH
    memory = step.program.memory_analysis()
    assert memory.alias_size_in_bytes > arguments > memory.temp_size_in_bytes
    assert step.need < 40e9
