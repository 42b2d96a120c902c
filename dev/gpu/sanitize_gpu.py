"""compute-sanitizer on one small run of each kernel, every run in a process of its own, several side by side.

    PYTHONPATH=src python3 dev/gpu/sanitize_gpu.py SECONDS [memcheck|racecheck|synccheck|initcheck …] [case …]

Without names: all tools, all cases. Cases joined by + share a process, whose start takes longer than most cases. A
run is given up at the deadline, none begins after it. The first case is a kernel with planted mistakes: a tool that
does not see its own proves nothing. Prints a line a run, then the kernels that no clean run launched; $OUT/sanitize
has each tool's whole report, sanitize.json its first lines. COMPUTE_SANITIZER names the tool where it is not on the
path nor beside nvcc. DRY=1 runs the cases without it (and without a card by the references).
"""

import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
OUT, SOURCES = os.environ.get("OUT", "/tmp"), Path(__file__).resolve().parents[2] / "src/ridgeline"
os.makedirs(f"{OUT}/sanitize", exist_ok=True)
DRY, CASE_FILE = bool(os.environ.get("DRY")), Path(__file__).with_name("sanitize_cases.py")
CASES = tuple(
    name
    for file in (CASE_FILE, CASE_FILE.with_name("sanitize_steps.py"))
    for name in re.findall(r"^@case\ndef (\w+)", file.read_text(), re.M)
)
WORKERS, LIMIT_S = int(os.environ.get("WORKERS", "14")), float(os.environ.get("LIMIT", "45"))  # of one run


def sanitizer():
    """The tool's path: named, on the path, or beside an nvcc."""
    named = os.environ.get("COMPUTE_SANITIZER") or shutil.which("compute-sanitizer")
    found = [named] if named else sorted(glob.glob("/usr/local/cuda*/bin/compute-sanitizer"), reverse=True)
    return found[0] if found else None


def command(tool, name, path):
    mine = [sys.executable, str(CASE_FILE), name]
    if path is None:
        return mine
    rest = ["--target-processes", "application-only", "--report-api-errors", "no", "--show-backtrace", "no"]
    rest += ["--launch-timeout", "0"]  # a busy host starts Python slowly; the deadline here is ours
    if tool != "initcheck":  # which must see PyTorch's writes
        rest += [word for kernel in sorted(kernels() | planted()) for word in ("--kernel-name", f"kne={kernel}")]
    return [path, "--tool", tool, "--print-limit", "100", *rest, *mine]


def run(tool, name, path, end):
    """One process: {"errors": how many, or a word; "lines": the report's first; "launched": kernels; "seconds"}."""
    begin = time.time()
    if end - begin < 8:
        return {"errors": "not begun", "seconds": 0}
    env = dict(os.environ, SANITIZER_TOOL=tool, PYTORCH_NO_CUDA_MEMORY_CACHING="1", OMP_NUM_THREADS="1")
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command(tool, name, path), env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(min(LIMIT_S, end - begin))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            code = "timeout"
        log.seek(0)
        text = log.read()
    Path(f"{OUT}/sanitize/{tool}-{name}.txt").write_text(text)
    return read(text, code) | {"seconds": round(time.time() - begin, 1)}


def read(text, code):
    """What a process said, in short."""
    report = [line.strip("= ").strip() for line in text.splitlines() if line.startswith("=====")]
    summary = next((line for line in report if "SUMMARY" in line), "")
    lines = [line for line in report if line and not line.startswith("COMPUTE-SANITIZER")][:6]
    counts = [int(n) for n in re.findall(r"(\d+) (?:error|hazard)", summary)]
    errors = max(counts) if counts else None
    if code == "timeout" or (errors is None and not (DRY and code == 0)) or (errors == 0 and code):
        lines += text.strip().splitlines()[-3:]
        errors = "timeout" if code == "timeout" else f"exit code {code}"
    return {"errors": errors or 0, "lines": lines, "launched": re.findall(r"^LAUNCHED (.*)$", text, re.M)}


def kernels():
    """The names of all kernels in the package."""
    found = set()
    for file in SOURCES.rglob("*.cu"):
        for head in file.read_text().split("__global__ void")[1:]:
            found |= set(re.findall(r"(?<![\w:])([a-z]\w*)\(", head.split("{")[0]))
    for file in SOURCES.rglob("*.py"):
        found |= set(re.findall(r"^@triton\.jit.*\ndef (\w+_kernel)\(", file.read_text(), re.M))
    return found


def planted():
    """The names of the kernels beside this file."""
    sources = "".join(file.read_text() for file in Path(__file__).parent.glob("sanitize_*.cu"))
    return set(re.findall(r"__global__ void (\w+)", sources))


def main(arguments):
    seconds = float(arguments[0])
    tools = [tool for tool in TOOLS if tool in arguments] or list(TOOLS)
    names = [name for name in arguments[1:] if name not in TOOLS] or list(CASES)
    if unknown := {name for job in names for name in job.split("+")} - set(CASES):
        sys.exit(f"no such tool or case: {', '.join(sorted(unknown))}; tools {TOOLS}, cases {CASES}")
    path = None if DRY else sanitizer()
    if path is None and not DRY:
        sys.exit("no compute-sanitizer: not on the path, not beside nvcc, not in COMPUTE_SANITIZER")
    results, clean, end = {}, {tool: set() for tool in tools}, time.time() + seconds

    def one(job):
        tool, name = job
        found = run(tool, name, path, end)
        results[f"{tool} {name}"] = found
        if name == "planted":
            word = "seen" if isinstance(found["errors"], int) and found["errors"] > 0 else "NOT SEEN"
        else:
            word = "clean" if found["errors"] == 0 else f"{found['errors']} ERRORS"
            if word == "clean":
                clean[tool] |= set(found["launched"])
        print(f"{tool:9} {name:40} {word:10} {found['seconds']:5.1f} s", flush=True)
        if word not in ("seen", "clean"):
            print("".join(f"    {line[:150]}\n" for line in found.get("lines", [])[:5]), end="", flush=True)
        with open(f"{OUT}/sanitize.json", "w") as file:
            json.dump(dict(results), file, indent=1)

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(one, [(tool, name) for tool in tools for name in names]))
    every = kernels()
    for tool in tools:
        missing = sorted(every - clean[tool])
        print(f"{tool}: {len(every) - len(missing)} of {len(every)} kernels ran clean; not: {' '.join(missing) or '-'}")


if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))
