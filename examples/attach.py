"""One engine shared by several processes. Usage: attach.py [MODEL]

The engine is a program of its own; here it is started by this script, usually by a service manager on its host."""

import subprocess
import sys
from pathlib import Path

import headrace
from headrace import SamplingParams

CLIENT = """
import sys, headrace
with headrace.connect(sys.argv[1]) as llm:
    print("another process:", llm.generate("Rain falls", headrace.SamplingParams(max_tokens=8))[0].outputs[0].text)
"""

program = Path(sys.executable).with_name("engine-core")  # installed beside this Python, which may not be on the PATH
command = [str(program), *sys.argv[1:2]]
engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
try:
    assert engine.stdout is not None
    address = engine.stdout.readline().split()[-1]  # "engine-core: ready at ipc:///..."
    with headrace.connect(address) as llm:
        other = subprocess.Popen([sys.executable, "-c", CLIENT, address])
        print("this process:", llm.generate("Snow falls", SamplingParams(max_tokens=8))[0].outputs[0].text)
        other.wait()
finally:
    engine.terminate()
    engine.wait()
