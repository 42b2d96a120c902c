"""What launching the next kernel early does to the running one: cycles of its straight-line code, constants, loads, meetings.

early_gpu.py [SECONDS] | early_gpu.py compile

A kernel of one block a processor goes through 1,024 different instructions (A), 64 that read parameters, loads in a row and
meetings, pass by pass; before its third pass it lets the next kernel in, waits until that must have been launched, and from
then on goes through another 1,024 instructions (B), which are cold in the third pass. Behind it comes nothing early, itself,
another kernel with as much shared memory, a small one, one of Triton's. Prints medians over blocks and launches, and writes
$OUT/early.json. About 10 s.
"""
import json, os, random, struct, sys, threading
from pathlib import Path

import triton
import triton.language as tl

from ridgeline.ops._triton.early import previous_done

OUT = Path(os.environ.get("OUT", "/tmp"))
PASSES, STAMPS, LAUNCHES, SMEM = 6, 12, 10, 200 * 1024
NAMES = ["A0", "A1", "A2", "A3", "constants", "loads", "meetings", "B0", "B1", "B2", "B3"]


def instructions(seed, count):
    r = random.Random(seed)
    return "".join(
        f'  asm volatile("fma.rn.f32 %0, %0, 0f{struct.pack(">f", r.uniform(0.5, 1)).hex().upper()}, %1;" : "+f"(x{i % 4}) : "f"(y));\n'
        for i in range(count)
    )


def source(seed):
    chunks = [instructions(seed * 100 + i, 256) + f"  STAMP({i + 1 if i < 4 else i + 4});\n" for i in range(8)]
    constants = "".join(f"  x{i % 4} = x{i % 4} * p.v[{(i * 37) % 128}] + y;\n" for i in range(64))
    return f'''#include "ridgeline/hopper.cuh"
struct alignas(16) Constants {{ float v[128]; }};
namespace rl {{
RL_D u32 ticks() {{ u32 t; asm volatile("mov.u32 %0, %%clock;" : "=r"(t) :: "memory"); return t; }}
}}
#define STAMP(i) do {{ const rl::u32 t = rl::ticks(); if (threadIdx.x == 0) marks_here[pass * {STAMPS} + (i)] = t; }} while (0)
extern "C" __global__ void __launch_bounds__(256, 1) probe(rl::u32* marks, const rl::u32* chase, float* sink, int launch, int trigger,
                                                           int pause, const __grid_constant__ Constants p) {{
  using namespace rl;
  __shared__ u32 marks_here[{PASSES * STAMPS}];
  wait_for_previous();
  if (trigger < 0) let_next_start();
  float x0 = threadIdx.x, x1 = x0 + 1, x2 = x0 + 2, x3 = x0 + 3, y = pause;
  u32 at = 4096 * blockIdx.x;
#pragma unroll 1
  for (int pass = 0; pass < {PASSES}; ++pass) {{
    __syncthreads();
    if (pass == trigger) let_next_start();
    const u32 from = ticks();
    while (ticks() - from < (pass % 2 ? 500 : pause)) {{}}
    __syncthreads();
    STAMP(0);
{"".join(chunks[:4])}
{constants}
  asm volatile("" : "+f"(x0), "+f"(x1), "+f"(x2), "+f"(x3));
  STAMP(5);
#pragma unroll 1
  for (int i = 0; i < 4; ++i) asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(at) : "l"(chase + at) : "memory");
  if (at == 1) x0 += 1;
  STAMP(6);
#pragma unroll
  for (int i = 0; i < 4; ++i) named_barrier<256>(1 + i);
  STAMP(7);
  if (pass < 2) {{
    STAMP(8); STAMP(9); STAMP(10); STAMP(11);
    continue;
  }}
{"".join(chunks[4:])}
  }}
  __syncthreads();
  if (x0 + x1 + x2 + x3 == 1234.5f) sink[0] = x0;
  if (threadIdx.x < {PASSES * STAMPS}) marks[(launch * gridDim.x + blockIdx.x) * {PASSES * STAMPS} + threadIdx.x] = marks_here[threadIdx.x];
}}
extern "C" __global__ void __launch_bounds__(128) little(float* sink) {{
  rl::wait_for_previous();
  rl::let_next_start();
  if (threadIdx.x == 0) sink[blockIdx.x] = {seed}.f;
}}
'''


def modules():
    from ridgeline.ops import _cuda as cuda

    folder = Path("/tmp/early_gpu")
    folder.mkdir(exist_ok=True)
    found = []
    for seed in (1, 2):
        path = folder / f"probe{seed}.cu"
        path.write_text(source(seed))
        c = cuda.build(path, {}, "sm_90a")
        print("EARLY compiled", {k: tuple(v) for k, v in c.resources().items()}, flush=True)
        found.append(path)
    return found


def few(x):
    x = sorted(x)
    return [x[len(x) // 10], x[len(x) // 2], x[-1 - len(x) // 10]]


def main():
    import torch
    from ridgeline.ops import _cuda as cuda, early
    from ridgeline.ops._triton.early import early_launch

    first, second = (cuda.load(p) for p in modules())
    kinds = "PPPiiiB512"
    kernels = {(m, e): (first, second)[m].kernel("probe", kinds, patient=e) for m in (0, 1) for e in (False, True)}
    little = {e: second.kernel("little", "P", patient=e) for e in (False, True)}
    index = torch.arange(1 << 20, dtype=torch.int64)
    chase = ((index + 37 * 32) % (1 << 20)).to(torch.int32).cuda()
    sink, other = torch.zeros(4096, device="cuda"), torch.zeros(LAUNCHES * 132 * PASSES * STAMPS, dtype=torch.int32, device="cuda")
    marks = torch.zeros(LAUNCHES, 132, PASSES, STAMPS, dtype=torch.int32, device="cuda")
    constants = struct.pack("128f", *[0.5 + i / 256 for i in range(128)])

    def probe(module, patient, to, launch, trigger, blocks, pause):
        kernels[module, patient].launch((blocks,), 256, SMEM, (to, chase, sink, launch, trigger, pause, constants))

    def triton_follower(patient):
        with early.early_launches(patient):
            fill_kernel[(1024,)](sink, **early_launch(sink.device))

    behind = {
        "itself": lambda e, t, b: None,
        "another": lambda e, t, b: probe(1, e, other, 0, t, b, 100),
        "little": lambda e, t, b: little[e].launch((1024,), 128, 0, (sink,)),
        "triton": lambda e, t, b: triton_follower(e),
    }
    scenarios = [  # what comes behind, launched early, the pass before which it is let in (-1: at the start), blocks
        ("itself", False, 2, 128), ("itself", True, 2, 128), ("another", False, 2, 128), ("another", True, 2, 128),
        ("another", True, -1, 128), ("little", False, 2, 128), ("little", True, 2, 128), ("triton", False, 2, 128),
        ("triton", True, 2, 128), ("another", True, 2, 132), ("another", True, 99, 128), ("little", True, -1, 128),
    ]  # fmt: skip
    results = []
    for what, patient, trigger, blocks in scenarios:
        def many():
            for i in range(LAUNCHES):
                probe(0, patient, marks, i, trigger, blocks, 6000)
                behind[what](patient, trigger, blocks)

        many()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            many()
        marks.zero_()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(3):
            a.record()
            graph.replay()
            b.record()
        torch.cuda.synchronize()
        stamps = marks.flatten()[: LAUNCHES * blocks * PASSES * STAMPS].view(LAUNCHES, blocks, PASSES, STAMPS).cpu()[2:-1]
        cycles = (stamps[..., 1:] - stamps[..., :-1]).clamp(min=0)
        row = {"behind": what, "early": patient, "let in before pass": trigger, "blocks": blocks, "us": a.elapsed_time(b) * 1e3 / LAUNCHES, "passes": []}
        print(f"EARLY behind {what}, early {patient}, let in {trigger}, {blocks} blocks: {row['us']:.1f} us", flush=True)
        for n in range(PASSES):
            d = cycles[:, :, n].reshape(-1, STAMPS - 1)
            parts = {name: few(d[:, i].tolist()) for i, name in enumerate(NAMES)}
            whole = {"A": few(d[:, :4].sum(1).tolist()), "B": few(d[:, 7:].sum(1).tolist())}
            row["passes"].append({**whole, **parts})
            print(f"EARLY   pass {n}: A {whole['A']} B {whole['B']} constants {parts['constants']} loads {parts['loads']} meetings {parts['meetings']}", flush=True)
        results.append(row)
        (OUT / "early.json").write_text(json.dumps(results))


@triton.jit
def fill_kernel(out, EARLY: tl.constexpr):
    previous_done(EARLY)
    tl.store(out + tl.program_id(0), 1.0)


if __name__ == "__main__":
    if sys.argv[1:] == ["compile"]:
        modules()
    else:
        threading.Timer(float(sys.argv[1]) if len(sys.argv) > 1 else 30, lambda: os._exit(3)).start()
        main()
        os._exit(0)
