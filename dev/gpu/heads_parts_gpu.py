"""What each part of the policy heads' Hopper kernel costs: its time with that part left out (the results are wrong then).

PYTHONPATH=src:dev/gpu OUT=$OUT python3 dev/gpu/heads_parts_gpu.py [SECONDS]     (25 s cold on 16 cores)
PYTHONPATH=src:dev/gpu python3 dev/gpu/heads_parts_gpu.py build                  (no card: every variant compiles)
"""

import concurrent.futures
import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

ROOT, COPIES = Path("src/ridgeline/ops"), Path("/tmp/heads_parts_src")
ROWS, KERNEL, LAYOUT = "heads_rows.cuh", "heads_sm90.cu", "heads_layout.cuh"
FORWARD = "          activate<false, false>(u0, u1);\n"
BACK = "          multiply_slopes(q0, q1, v0 + from_bits(sc.y), v1 + from_bits(sc.w));\n"
FENCE = (ROWS, "    fence_async();\n", "")
STORE = (KERNEL, "    store_2d(p.p, p_tile(smem, group, chunk), chunk * 64, previous);\n", "")
COPY = [
    (KERNEL, "      barrier_expect(bar.p_full(group, free), TILE_BYTES);\n", "      if (tiles.round > 0) {\n        barrier_arrive(bar.p_full(group, free));\n        continue;\n      }\n      barrier_expect(bar.p_full(group, free), TILE_BYTES);\n"),
]  # fmt: skip
NO_LOGITS = (ROWS, "        wgmma_registers<V_COLUMNS, 0>(logits, operand, operand_k_major(down_piece(piece) + 32 * k), 1);\n", "        logits[k] += from_bits(operand[0] ^ operand[1] ^ operand[2] ^ operand[3]);\n")  # fmt: skip
NO_DA = (ROWS, "        wgmma_registers<32, 1>(x, dl[k], operand_mn_major(down_piece(piece) + 2048 * k, 0), k > 0);\n", "        for (int i = 0; i < 16; ++i) x[i] = from_bits(dl[k][i % 4]) + i;\n")  # fmt: skip
NO_HEARD = (ROWS, "        wgmma_registers<32, 1>(x, earlier[k], operand_mn_major(earlier_piece(piece) + 2048 * k, 0), 1);\n", "        x[k] += from_bits(earlier[k][0]);\n")  # fmt: skip
NO_SUMS = [
    (KERNEL, "          wgmma<V_COLUMNS, 1, 1>(down[chunk], operand_mn_major(a_tile(smem, group, chunk) + 2048 * k, 0),\n                                 operand_mn_major(narrow + 2048 * k, 0), 1);\n", "          down[chunk][k] += 1.f;\n"),
    (KERNEL, "          wgmma<SIDE_COLUMNS, 1, 1>(side[chunk], operand_mn_major(p_tile(smem, group, chunk) + 2048 * k, 0),\n                                    operand_mn_major(narrow + 2 * V_COLUMNS + 2048 * k, 0), 1);\n", "          side[chunk][k] += 1.f;\n"),
]  # fmt: skip
VARIANTS = {
    "whole": [],
    "no GELU forward": [(ROWS, FORWARD, "")],
    "no GELU back": [(ROWS, BACK, "          q0 += v0 + from_bits(sc.y), q1 += v1 + from_bits(sc.w);\n")],
    "no GELU at all": [(ROWS, FORWARD, ""), (ROWS, BACK, "          q0 += v0 + from_bits(sc.y), q1 += v1 + from_bits(sc.w);\n")],
    "no fences": [FENCE],
    "no heard logits stored": [(ROWS, "      if (HEARD) say(said, tiles.row());\n", "")],
    "no loss": [(ROWS, "      lose(logits, said);\n", "      for (int i = 0; i < V_COLUMNS / 2; ++i) dl[i / 8][i % 4] = as_bits(logits[i]), said[i / 4][i % 2] = as_bits(logits[i]), classes[i / 2] += logits[i];\n")],
    "no q stored": [STORE],
    "no p copied": COPY,
    "no q, no p": [STORE, *COPY],
    "no logits' product": [NO_LOGITS],
    "no dl W2": [NO_DA],
    "no heard product": [NO_HEARD],
    "no products": [NO_LOGITS, NO_DA, NO_HEARD],
    "no sums' products": NO_SUMS,
    "no copies, no sums": [STORE, *COPY, *NO_SUMS],
    "no copies, no sums, no products": [STORE, *COPY, *NO_SUMS, NO_LOGITS, NO_DA, NO_HEARD],
    "no copies, no sums, no GELU": [STORE, *COPY, *NO_SUMS, (ROWS, FORWARD, ""), (ROWS, BACK, "          q0 += v0 + from_bits(sc.y), q1 += v1 + from_bits(sc.w);\n")],
    "half the tiles, one warpgroup": [(LAYOUT, "  RL_D bool valid(const Problem& p) const { return tile * ROWS < p.rows; }\n", "  RL_D bool valid(const Problem& p) const { return tile * ROWS < p.rows && tile % 2 == 0; }\n")],
    "half the tiles, both": [(LAYOUT, "  RL_D bool valid(const Problem& p) const { return tile * ROWS < p.rows; }\n", "  RL_D bool valid(const Problem& p) const { return tile * ROWS < p.rows / 2; }\n")],
    "no tiles": [(LAYOUT, "  RL_D bool valid(const Problem& p) const { return tile * ROWS < p.rows; }\n", "  RL_D bool valid(const Problem& p) const { return tile * ROWS < p.rows && p.rows < 100; }\n")],
}  # fmt: skip


def source(name):
    """The kernel's file of a variant."""
    folder = COPIES / "".join(c if c.isalnum() else "_" for c in name)
    for part in ("policy_heads", "linear", "attention/cuda"):
        shutil.copytree(ROOT / part, folder / part, dirs_exist_ok=True)
    for file, old, new in VARIANTS[name]:
        path = folder / "policy_heads" / file
        text = path.read_text()
        assert text.count(old) == 1, (name, text.count(old), old)
        path.write_text(text.replace(old, new))
    return folder / "policy_heads" / KERNEL


def build(name):
    """Compile a variant's three kernels into the cache; what ptxas says of them."""
    import torch

    from ridgeline.ops import _cuda as cuda
    from ridgeline.ops.policy_heads import hopper
    from ridgeline.ops.policy_heads.layout import layout

    path, plan = source(name), layout(512, ((256, 9), (260, 37), (279, 6)), hopper.STEP)
    made = [cuda.build(path, hopper.defines(plan, place, torch.bfloat16, torch.int64)) for place in plan.heads]
    serial = [i for i, cubin in enumerate(made) if "C7510" in cubin.log or "C7515" in cubin.log]
    return [cubin.resources()["head"].spill_loads for cubin in made], serial


def main(seconds):
    end, found = time.time() + seconds, {}
    with concurrent.futures.ProcessPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        built = dict(zip(VARIANTS, pool.map(build, VARIANTS)))
    import torch
    from heads_trace_gpu import captured, each_head, op

    from ridgeline.ops.policy_heads import hopper

    step = op()
    for name in VARIANTS:
        if time.time() > end:
            print(name, "no time left", flush=True)
            continue
        hopper.SOURCE = source(name)
        hopper._kernel.cache_clear()
        graph = captured(step)
        rounds = [each_head(graph) for _ in range(3)]
        found[name] = [statistics.median(column) for column in zip(*rounds)]
        torch.cuda.synchronize()
        print(f"{name:32} {found[name]} us; spills {built[name][0]}, serialised {built[name][1]}", flush=True)
        with open(f"{os.environ.get('OUT', '/tmp')}/heads_parts.json", "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    if sys.argv[1:] == ["build"]:
        for name in VARIANTS:
            print(name, build(name), flush=True)
    else:
        main(float(sys.argv[1]) if len(sys.argv) > 1 else 40)
