"""Run by file name (:mod:`jspeed.plan.cudnn.ask`): reads calls of attention from stdin, writes
cuDNN's answers.

It stands alone because a refusal of cuDNN can end its process, and because the libraries must be
found when it starts.
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any


def main(folder: str) -> None:
    """Write a line with cuDNN's version, then one for each call: {"engine", "workspace"} or
    {"refused"}."""
    [library] = Path(folder).glob("nvidia/cudnn/lib/libcudnn.so.9")
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    sys.path.insert(0, folder)
    import cudnn

    print(json.dumps({"version": cudnn.backend_version_string()}), flush=True)
    properties, *calls = map(json.loads, sys.stdin)
    device = cudnn.create_device_properties(json.dumps(properties))
    for call in calls:
        try:
            engine, workspace = execution_plan(cudnn, device, **call)
            answer: dict[str, Any] = {"engine": engine, "workspace": workspace}
        except Exception as error:
            answer = {
                "refused": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
            }
        print(json.dumps(answer), flush=True)


def execution_plan(
    cudnn: Any, device: Any, backward: bool, documents: int, heads: int, length: int, width: int,
    packed: bool,
    causal: bool, window: int
) -> tuple[str, int]:  # fmt: skip
    """Build the graph that XLA builds (cuda_dnn.cc), and return (name of the engine, bytes of
    workspace)."""
    types = cudnn.data_type
    graph = cudnn.pygraph(
        io_data_type=types.BFLOAT16, intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        device_property=device,
    )  # fmt: skip
    shape, strides = (
        (documents, heads, length, width),
        (length * heads * width, width, heads * width, 1),
    )
    rows = {"dim": (documents, heads, length, 1), "stride": (heads * length, length, 1, 1)}

    def numbers(name: str, size: int) -> Any:
        return graph.tensor(
            name=name, dim=(size, 1, 1, 1), stride=(1, 1, 1, 1), data_type=types.INT32
        )

    offsets = (
        {name: numbers(name, documents + 1) for name in ("offset_q", "offset_kv")} if packed else {}
    )
    mask: dict[str, Any] = {"attn_scale": 0.12, "use_causal_mask": causal}
    if packed:
        mask |= {"use_padding_mask": True, "seq_len_q": numbers("length_q", documents)}
        mask |= {"seq_len_kv": numbers("length_kv", documents)}
    if window:
        mask["sliding_window_length"] = window

    def placed(tensor: Any, of: str) -> Any:
        if packed:
            tensor.set_ragged_offset(offsets[f"offset_{of}"])
        return tensor

    def array(name: str, of: str) -> Any:
        return placed(
            graph.tensor(name=name, dim=shape, stride=strides, data_type=types.BFLOAT16), of
        )

    q, k, v = array("q", "q"), array("k", "kv"), array("v", "kv")
    if backward:
        statistic = graph.tensor(name="statistic", data_type=types.FLOAT, **rows)
        results = graph.sdpa_backward(
            q=q, k=k, v=v, o=array("o", "q"), dO=array("do", "q"), stats=statistic, **mask
        )
    else:
        out, statistic = graph.sdpa(q=q, k=k, v=v, is_inference=False, **mask)
        statistic.set_output(True).set_data_type(types.FLOAT).set_dim(rows["dim"]).set_stride(
            rows["stride"]
        )
        results = [out]
    for result, of in zip(results, ("q", "kv", "kv"), strict=False):
        placed(result.set_output(True).set_dim(shape).set_stride(strides), of)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans(cudnn.build_plan_policy.HEURISTICS_CHOICE)
    return graph.get_plan_name_at_index(0), graph.get_workspace_size()


if __name__ == "__main__":
    main(sys.argv[1])
