"""Effect of storing parameters in bf16, without an fp32 copy, in record 89's Adam over a whole
run."""

from collections.abc import Mapping, Sequence

import numpy as np

from .original import Original, Rank

# Where MUDD and gate biases of record 89 start, by its name for the parameter.
BIASES = {"mudd_b2": (20.0, 1.1**0.5 / 0.1, 10.0, 0.5, -5.0), "mudd_gate_b2": (2.5, 0.5, 5.0, 10.0)}


def adam_of_a_run(
    script: Original, label: str, starts: Sequence[float], gradients: np.ndarray
) -> Mapping[str, np.ndarray]:
    """Where numbers end in bf16, as the record stores them, and in fp32: ``gradients`` has one for
    every update."""

    def run(rank: Rank) -> dict[str, np.ndarray]:
        import torch

        space, ends = rank.namespace, {}
        optimizer, schedule = space["training_manager"].optimizer, space["training_schedule"]
        (config,) = [config for config in optimizer.param_cfgs.values() if config.label == label]
        odd = range(1, schedule.total_steps, 2)
        for dtype in (torch.bfloat16, torch.float32):
            p = torch.tensor(starts, dtype=torch.float32).to(dtype)
            zeros = torch.zeros(len(starts))
            optimizer.param_states[p] = dict(
                step=0, exp_avg=zeros.clone(), exp_avg_sq=zeros.clone()
            )
            for step, gradient in zip(odd, gradients, strict=True):
                config.lr = config.initial_lr * schedule.get_lr(step)
                optimizer._adam_update(
                    p, torch.full((len(starts),), float(gradient)).to(dtype), config, 0
                )
            del optimizer.param_states[p]
            ends[str(dtype).split(".")[1]] = p.float().numpy()
        return ends

    return script.each(run)[0]
