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
FORWARD = (ROWS, "          const u32 here = activate<false, true>(u0, u1);\n", "          const u32 here = half_pair(u0, u1);\n")
FENCE = (ROWS, "    fence_async();\n", "")
STORE = (KERNEL, "    store_2d(p.p, p_tile(smem, group, chunk), chunk * 64, row);\n", "")
COPY = [(KERNEL, "      load_p(p, smem, bar, group, chunk - 1, tiles.row());\n", "      barrier_arrive(bar.p_full(group, chunk - 1));\n")]
NO_TOTALS = (ROWS, "      add_product(totals.logits, a, piece);\n      add_product(totals.v, v_slope, piece);\n      add_product(totals.s, s_slope, piece);\n", "      for (int i = 0; i < 4; ++i) totals.logits[i] += from_bits(a[i][0] ^ a[i][1]), totals.v[i] += from_bits(v_slope[i][0] ^ v_slope[i][1]), totals.s[i] += from_bits(s_slope[i][0] ^ s_slope[i][1]);\n")  # fmt: skip
NO_DA = (ROWS, "        wgmma_registers<64, 1>(x, dl[k], operand_mn_major(down_piece(2 * chunk) + 2048 * k, 0), k > 0);\n", "        for (int i = 0; i < 32; ++i) x[i] = from_bits(dl[k][i % 4]) + i;\n")  # fmt: skip
NO_HEARD = (ROWS, "        wgmma_registers<32, 1>(x, earlier[k], operand_mn_major(earlier_piece(piece) + 2048 * k, 0), 1);\n", "        x[k] += from_bits(earlier[k][0]);\n")  # fmt: skip
NO_SUMS = [
    (KERNEL, "          wgmma<V_COLUMNS, 1, 1>(down[chunk], operand_mn_major(a_tile(smem, group, chunk) + 2048 * k, 0),\n                                 operand_mn_major(narrow + 2048 * k, 0), 1);\n", "          down[chunk][k] += 1.f;\n"),
    (KERNEL, "          wgmma<SIDE_COLUMNS, 1, 1>(side[chunk], operand_mn_major(p_tile(smem, group, chunk) + 2048 * k, 0),\n                                    operand_mn_major(narrow + 2 * V_COLUMNS + 2048 * k, 0), 1);\n", "          side[chunk][k] += 1.f;\n"),
]  # fmt: skip
TILES = "  RL_D bool valid(const Problem& p) const { return tile * ROWS < p.rows; }\n"
VALID = "  RL_D bool valid(const Problem& p) const { return tile * ROWS < p.rows && "
VARIANTS = {
    "warm up": [],
    "whole": [],
    "no GELU": [FORWARD],
    "no loss": [(ROWS, "      lose(totals, said, shift, slope);\n", "      for (int i = 0; i < V_COLUMNS / 2; ++i) dl[i / 8][i % 4] = as_bits(totals.logits[i]), said[i / 4][i % 2] = as_bits(totals.v[i]), classes[i / 2] += totals.s[i];\n      shift[0] = shift[1] = slope[0] = slope[1] = 0;\n")],
    "no products": [NO_TOTALS, NO_DA, NO_HEARD],
    "no sums' products": NO_SUMS,
    "no q, no p": [STORE, *COPY],
    "no fences": [FENCE],
    "no copies, sums, products, GELU": [STORE, *COPY, *NO_SUMS, NO_TOTALS, NO_DA, NO_HEARD, FORWARD],
    "half the tiles, one warpgroup": [(LAYOUT, TILES, VALID + "tile % 2 == 0; }\n")],
    "an eighth of the tiles": [(LAYOUT, TILES, VALID + "tile < 264; }\n")],
    "a quarter of the tiles": [(LAYOUT, TILES, VALID + "tile < 528; }\n")],
    "half the tiles": [(LAYOUT, TILES, VALID + "tile < 1024; }\n")],
    "no tiles": [(LAYOUT, TILES, VALID + "p.rows < 100; }\n")],
    "whole again": [],
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
    from fused_gpu import captured
    from heads_trace_gpu import each_head, op

    from ridgeline.ops.policy_heads import hopper

    step = op()
    for name in VARIANTS:
        if time.time() > end:
            print(name, "no time left", flush=True)
            continue
        hopper.SOURCE = source(name)
        hopper._kernel.cache_clear()
        graph = captured(step)
        rounds = [each_head(graph) for _ in range(4)][1:]
        found[name] = [statistics.median(column) for column in zip(*rounds)]
        torch.cuda.synchronize()
        print(f"{name:32} {found[name]} us; spills {built[name][0]}, serialised {built[name][1]}", flush=True)
        with open(f"{os.environ.get('OUT', '/tmp')}/heads_parts.json", "w") as file:
            json.dump(found, file)
    twice(step)


class Twice:
    """A kernel that is launched twice whenever it is asked for."""

    def __init__(self, kernel):
        self.kernel = kernel

    def launch(self, *arguments):
        self.kernel.launch(*arguments)
        self.kernel.launch(*arguments)


def twice(step):
    """Each head's kernel behind another kernel, and behind itself: what a launch pays for code that is not there."""
    from fused_gpu import captured
    from heads_trace_gpu import profiled

    from ridgeline.ops.policy_heads import hopper

    hopper.SOURCE = source("whole")
    hopper._kernel.cache_clear()
    real = hopper._kernel
    hopper._kernel = lambda *which: Twice(real(*which))
    found = profiled(captured(step), ("head",))
    hopper._kernel = real
    us = [statistics.median(us for _, us, _ in found[i::6]) for i in range(6)]
    print(f"each twice: first time {us[::2]}, behind itself {us[1::2]} us", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["build"]:
        for name in VARIANTS:
            print(name, build(name), flush=True)
    else:
        main(float(sys.argv[1]) if len(sys.argv) > 1 else 40)
