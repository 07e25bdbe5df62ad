"""What the protocol loads, and what no module of the package may contain."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import anyengine

PACKAGE = Path(anyengine.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
CODE_FROM_BYTES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
CODE_FROM_TEXT = {"eval", "exec", "compile", "__import__"}


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=50)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_protocol_loads_no_async_library_and_no_array_library() -> None:
    modules = [f"anyengine.protocol.{path.stem}" for path in sorted((PACKAGE / "protocol").glob("*.py"))]
    code = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name.removesuffix(".__init__"))
heavy = {{"anyio", "trio", "asyncio", "torch", "numpy", "zmq", "multiprocessing", "socket", "threading"}}
print(sorted(heavy & set(sys.modules)))
"""
    loaded = ast.literal_eval(run_python(code).strip())
    # cbor2 and the standard library may load what they like of these two.
    assert set(loaded) <= {"threading", "socket"}


def test_an_array_passes_through_a_process_that_has_not_loaded_its_library() -> None:
    code = """
import sys
from anyengine.protocol import cbor, packing
from anyengine.protocol.arrays import WireArray
for library, dtype in (("torch", "bfloat16"), ("numpy", ">f4")):
    array = WireArray(library, dtype, (2, 0, 3), memoryview(b""))
    body = packing.encode({"a": [array]}, [], path="value")
    received = cbor.decode(body)["a"][0]
    assert isinstance(received, WireArray), received
    assert (received.library, received.dtype, received.shape) == (library, dtype, (2, 0, 3))
    assert packing.encode({"a": [received]}, [], path="value") == body
assert not {"torch", "numpy"} & set(sys.modules)
"""
    run_python(code)


def test_torch_without_numpy_is_enough_for_tensors() -> None:
    code = """
import sys, warnings
sys.modules["numpy"] = None
warnings.simplefilter("ignore")
import torch
from anyengine.protocol import cbor, packing
tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T
received = cbor.decode(packing.encode(tensor, [], path="value"))
assert torch.equal(received, tensor)
received[0, 0] = 5
"""
    run_python(code)


def test_decoding_every_message_calls_nothing_that_makes_code_from_bytes() -> None:
    code = """
import builtins, marshal, os, pickle, sys
sys.path.insert(0, ".")
import numpy, torch
from tests.protocol.machines import *
from tests.protocol.test_hostile_bytes import LARGE, SAMPLES
from anyengine.protocol.messages import decode_from_client, decode_from_engine
from tests.protocol.strategies import arrived
messages = [[arrived(m.encode()) for m in (*SAMPLES[d], *LARGE[d])] for d in ("to_engine", "to_client")]
def decode_all():
    for decode, frames in zip((decode_from_client, decode_from_engine), messages):
        for message in frames:
            decode(message)
decode_all()  # imports that are still to come are not of interest
def forbidden(*args, **kwargs):
    raise SystemExit("code from bytes")
for module, name in ((pickle, "loads"), (pickle, "load"), (pickle, "Unpickler"), (marshal, "loads"), (marshal, "load"),
                     (builtins, "eval"), (builtins, "exec"), (builtins, "compile")):
    setattr(module, name, forbidden)
sys.addaudithook(lambda event, args: forbidden() if event in ("pickle.find_class", "marshal.loads", "exec", "compile",
                                                              "import", "subprocess.Popen", "os.system") else None)
decode_all()
os.write(1, b"nothing was called")
os._exit(0)  # what interpreters do on their way out is not of interest either
"""
    assert run_python(code) == "nothing was called"


@pytest.mark.parametrize("path", MODULES, ids=[str(path.relative_to(PACKAGE)) for path in MODULES])
def test_no_module_of_the_package_makes_code_from_bytes(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            assert name.partition(".")[0] not in CODE_FROM_BYTES, f"line {node.lineno} imports {name}"
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name):
                assert called.id not in CODE_FROM_TEXT, f"line {node.lineno} calls {called.id}"
            elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
                assert (called.value.id, called.attr) not in _FORBIDDEN_CALLS, f"line {node.lineno}"
                if (called.value.id, called.attr) == ("torch", "load"):
                    safe = [ast.literal_eval(word.value) for word in node.keywords if word.arg == "weights_only"]
                    assert safe == [True], f"line {node.lineno}: torch.load is pickle unless weights_only=True"


_FORBIDDEN_CALLS = {
    *(("builtins", name) for name in CODE_FROM_TEXT),
    ("zmq", "recv_pyobj"),
    ("socket", "recv_pyobj"),
    ("socket", "send_pyobj"),
}


def test_the_check_of_modules_sees_all_of_them_and_can_fail(tmp_path: Path) -> None:
    assert {"cbor.py", "proc.py", "engine_client.py"} <= {path.name for path in MODULES}
    for number, line in enumerate(
        [
            "import pickle",
            "import pickle as p",
            "from pickle import loads",
            "import marshal",
            "from shelve import open",
            "def f():\n    import dill",
            "import cloudpickle.cloudpickle",
            "eval('1')",
            "exec('1')",
            "torch.load('file')",
            "torch.load('file', weights_only=False)",
            "import builtins\nbuiltins.eval('1')",
        ]
    ):
        path = tmp_path / f"module{number}.py"
        path.write_text(line)
        with pytest.raises(AssertionError):
            test_no_module_of_the_package_makes_code_from_bytes(path)
    fine = tmp_path / "fine.py"
    fine.write_text("model.eval()\nre.compile('x')\ntorch.load('file', weights_only=True)\nimport pickletools")
    test_no_module_of_the_package_makes_code_from_bytes(fine)
