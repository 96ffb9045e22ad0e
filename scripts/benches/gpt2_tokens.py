"""Times transformers' greedy tokens, in a Python that has it: FOLDER FIRST NUMBER.

A GPT-2 of 124 M random parameters generates NUMBER tokens after token FIRST. Prints wall seconds,
processor seconds and the tokens as JSON. Saves the model in FOLDER, unless that is empty.
"""

import json
import sys
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(eos_token_id=None)).eval()
folder, begin, number = sys.argv[1], torch.tensor([[int(sys.argv[2])]]), int(sys.argv[3])
if folder:
    model.save_pretrained(folder)
how = {"attention_mask": torch.ones_like(begin), "do_sample": False, "pad_token_id": 0}
how |= {"max_new_tokens": number, "min_new_tokens": number}
model.generate(begin, **how)  # warms up
wall, cpu = time.perf_counter(), time.process_time()
ids = model.generate(begin, **how)[0, 1:].tolist()
print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu, ids]))
