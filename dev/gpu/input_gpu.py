"""The input vector's kernel of hal-20m by launches, µs in turns, each compared with the first's result.

    PYTHONPATH=src:dev/gpu python3 dev/gpu/input_gpu.py [seconds]
"""

import sys
import time

import torch
from gemm_gpu import graph_of, in_turns

from ridgeline.ops._triton.support import Launch
from ridgeline.ops.inputs import InputColumns
from ridgeline.ops.inputs.function import column_table
from ridgeline.ops.inputs.triton import input_vector_raw

N, SHAPES = 131072, ((7, 4), (33, 12), (400, 32))
COLUMNS = InputColumns(tables=(0, 1, 1, 2, 2), numbers=18, one_hots=((1, 37), (0, 9), (2, 6)))
end = time.time() + float(sys.argv[1] if len(sys.argv) > 1 else 20)
draw = lambda *highs: torch.stack([torch.randint(high, (N,), device="cuda") for high in highs], 1)
categories, previous = draw(7, 33, 33, 400, 400).to(torch.int16), draw(9, 37, 6).to(torch.uint8)
numbers, tables = torch.randn(N, 18, device="cuda"), torch.randn(sum(r * w for r, w in SHAPES), device="cuda").bfloat16()
place = column_table(COLUMNS, SHAPES, torch.device("cuda"))
out, right, graphs = torch.empty(N, len(place), device="cuda", dtype=torch.bfloat16), None, {}
for rows, warps in ((8, 4), (16, 4), (16, 8), (32, 8), (4, 2), (8, 2)):
    if time.time() > end - 4:
        break
    run = lambda launch=Launch(rows=rows, warps=warps): input_vector_raw(categories, numbers, previous, tables, place, 92, out, launch)
    run()
    right = out.clone() if right is None else right
    graphs[rows, warps] = graph_of(run, 8)
    assert torch.equal(out, right), (rows, warps)
for (rows, warps), us in in_turns(graphs, 8, turns=10).items():
    print(f"input vector, {rows:2} rows, {warps} warps: {us[4]:6.1f} us", flush=True)
