"""A child that speaks the protocol of engine_child.py without a model: for tests.

`stand_in.py SECONDS FAULT FOLDER` answers each request with SECONDS. FAULT is `none`, or what goes
wrong from the fourth request on: `dies`, `hangs`, `garbage`, `short`; or `start`, at once.
"""

import json
import os
import sys
import time
from pathlib import Path


def write(folder, name, text):
    part = folder / f"{name}.part"
    part.write_text(text, "utf-8")
    os.replace(part, folder / f"{name}.answer.json")


def main():
    seconds, fault, folder = float(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    print('garbage {"seconds": on standard output', flush=True)
    if fault == "start":
        print("ImportError: no module named _C", flush=True)
        print("    raise RuntimeError: shown as code", flush=True)
        raise RuntimeError("the engine's core did not start")
    write(folder, "ready", json.dumps({"seconds": 0.1, "version": "9.9"}))
    for count, line in enumerate(sys.stdin):
        name = line.strip()
        request = json.loads((folder / f"{name}.json").read_text("utf-8"))
        if fault != "none" and count >= 3:
            if fault == "dies":
                print("torch.OutOfMemoryError: CUDA out of memory", flush=True)
                os._exit(3)
            if fault == "hangs":
                print("still compiling", flush=True)
                time.sleep(60)
            if fault == "garbage":
                write(folder, name, "[1, 2")
                continue
        answer = {"seconds": seconds}
        if request["keep"]:
            n = request["new_tokens"] - (fault == "short")
            drift = len(request["prompts"]) * 1e-3 * (seconds > 1)
            pairs = [([p[0]] * n, [-1.5 - drift] * n) for p in request["prompts"]]
            answer["completions"] = pairs[1:] if fault == "short" else pairs
        write(folder, name, json.dumps(answer))


if __name__ == "__main__":
    main()
