"""compute-sanitizer on one small run of each kernel, several processes side by side.

    PYTHONPATH=src python3 dev/gpu/sanitize_gpu.py SECONDS [memcheck|racecheck|synccheck|initcheck …] [case …]

Without names: all tools, all cases in the groups below. Cases joined by + share a process, whose start takes longer
than most cases. A run is given up at the deadline or after LIMIT seconds, none begins with less than 8 s left. Controls
come first: a kernel with a planted mistake (a tool that does not see its own proves nothing), the same in a process
that aborts, a product of cuBLAS, and orders that are right and reported. Prints a line a run, then for each kernel
what each tool says: clean, a report whose reason is known, a report, none. $OUT/sanitize has the reports,
sanitize.json what was read in them; exits with 1 where a report is not known, a planted mistake was not seen, or a
kernel of all cases has no verdict. COMPUTE_SANITIZER names the tool where it is not on the path nor beside nvcc.
DRY=1 runs the cases without it: on a card that compiles everything, without one by interpreter and references.
"""

import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import sanitize_verdicts as verdicts

OUT = os.environ.get("OUT", "/tmp")
os.makedirs(f"{OUT}/sanitize", exist_ok=True)
DRY, CASE_FILE = bool(os.environ.get("DRY")), Path(__file__).with_name("sanitize_cases.py")
CONTROLS = {  # and the tools that they are for
    "planted": verdicts.TOOLS,
    "planted_and_aborted": ("racecheck", "synccheck"),
    "orders": ("racecheck", "synccheck", "initcheck"),
    "vendor": ("racecheck",),
    "twins": ("racecheck",),
    "twins_of_products": ("racecheck",),
}
JOBS = (
    "attention_triton",
    "heads_triton+heads_float",
    "step_hal",
    "step_muon",
    "mlp_rows+mlp_rows_narrow",
    "project_rows+project_many",
    "mlp_many",
    "rungs_materialised",
    "rungs_fused",
    "step_gpt2_float+step_fast_float",
    "step_fast_long+step_hal_small",
    "step_124m",
    "linear_stationary+linear_gemm",
    "heads_hopper+inputs+windows",
    "step_gpt2_many+step_fast_many",
    "step_gpt2+step_fast",
    "cross_entropies",
    "attention_plain+attention_float+attention_float_lanes",
    "attention_short+attention_short_256+attention_short_group+attention_short_whole_groups",
    "weight_gradients+fp32_products",
    "embeddings+norms+pointwise",
)
WORKERS, LIMIT_S = int(os.environ.get("WORKERS", "10")), float(os.environ.get("LIMIT", "100"))  # of one run
OURS = verdicts.names()
PLANTED = {"planted", "planted_and_aborted", "orders"}
KEPT = 300_000  # characters of a report


def sanitizer():
    """The tool's path: named, on the path, or beside an nvcc."""
    named = os.environ.get("COMPUTE_SANITIZER") or shutil.which("compute-sanitizer")
    found = [named] if named else sorted(glob.glob("/usr/local/cuda*/bin/compute-sanitizer"), reverse=True)
    return found[0] if found else None


def command(tool, job, path):
    mine = [sys.executable, str(CASE_FILE), job]
    if path is None:
        return mine
    rest = ["--target-processes", "application-only", "--report-api-errors", "no", "--show-backtrace", "no"]
    rest += ["--launch-timeout", "0"]  # a busy host starts Python slowly; the deadline here is ours
    if tool != "initcheck" and job not in PLANTED:  # initcheck must see PyTorch's writes
        rest += [word for kernel in sorted(OURS) for word in ("--kernel-name", f"kne={kernel}")]
    return [path, "--tool", tool, "--print-limit", "20000", *rest, *mine]


def run(tool, job, path, end):
    """One process, read; "seconds" with it."""
    begin = time.time()
    if end - begin < 8:
        return {"launched": {}, "ended": [], "reported": {}, "first": [], "died": "not begun", "seconds": 0}
    env = dict(os.environ, SANITIZER_TOOL=tool, PYTORCH_NO_CUDA_MEMORY_CACHING="1", OMP_NUM_THREADS="1")
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command(tool, job, path), env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(min(LIMIT_S, end - begin))
        except subprocess.TimeoutExpired:
            stop(process)
            code = "timeout"
        log.seek(0)
        text = log.read()
    if DRY:
        text += "\nSUMMARY of none"
    Path(f"{OUT}/sanitize/{tool}-{job[:80]}.txt").write_text(
        text[:KEPT] + ("\n…\n" + text[-KEPT:]) * (len(text) > KEPT)
    )
    return verdicts.read(text, code, OURS) | {"seconds": round(time.time() - begin, 1)}


def stop(process):
    """Ends what the tool looks at, so that the tool still says what it has seen; then the tool."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    for pid in children.read_text().split() if children.exists() and not DRY else ():
        os.kill(int(pid), 9)
    try:
        process.wait(0 if DRY else 4)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()


def word_for(job, found):
    if job in PLANTED and not DRY:
        return "seen" if found["reported"] else "NOT SEEN"
    if found["reported"]:
        return "reports of " + ", ".join(f"{kernel} ({count})" for kernel, count in found["reported"].items())
    return "clean" if found["died"] is None else "died"


def main(arguments):
    seconds = float(arguments[0])
    tools = [tool for tool in verdicts.TOOLS if tool in arguments] or list(verdicts.TOOLS)
    jobs = [name for name in arguments[1:] if name not in verdicts.TOOLS] or [*(() if DRY else CONTROLS), *JOBS]
    path = None if DRY else sanitizer()
    if path is None and not DRY:
        sys.exit("no compute-sanitizer: not on the path, not beside nvcc, not in COMPUTE_SANITIZER")
    results, end = {}, time.time() + seconds

    def one(each):
        tool, job = each
        found = run(tool, job, path, end)
        results[tool, job] = found
        print(f"{tool:9} {job:60} {found['seconds']:5.1f} s  {word_for(job, found)}", flush=True)
        if found["died"]:
            print(f"    {found['died'][:150]}; ended: {' '.join(found['ended']) or '-'}", flush=True)
        with open(f"{OUT}/sanitize.json", "w") as file:
            json.dump({" ".join(key): value for key, value in dict(results).items()}, file, indent=1)

    with ThreadPoolExecutor(WORKERS) as pool:
        list(
            pool.map(one, [(tool, job) for tool in tools for job in jobs if tool in CONTROLS.get(job, verdicts.TOOLS)])
        )
    own = {
        tool: [found for (by, job), found in results.items() if by == tool and job not in CONTROLS] for tool in tools
    }
    print("\n".join(verdicts.table(own, OURS)))
    words = {verdicts.verdict(tool, kernel, own[tool])[0] for tool in tools for kernel in OURS}
    blind = any(job in PLANTED and not found["reported"] for (_, job), found in results.items())
    sys.exit(1 if blind or "REPORT" in words or ("none" in words and len(arguments) == 1 + len(tools)) else 0)


if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))
